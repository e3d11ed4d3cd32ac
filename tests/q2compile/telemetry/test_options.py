# SPDX-License-Identifier: Apache-2.0
"""The option `telemetry`: values that it accepts and rejects."""

from pathlib import Path

import pytest

from q2compile import Config
from q2compile.config import CONFIG_FILE_VARIABLE, telemetry_options
from q2compile.telemetry.options import TelemetryOptions


def test_refused_by_name():
    for given, said in [
        (3, r"telemetry: got 3; allowed: a mapping such as"),
        (True, r"telemetry: got True; allowed: a mapping"),
        ({"everyy": 3}, r"unknown key of telemetry 'everyy'; did you mean 'every'\?"),
        ({"every": 0}, r"telemetry: every: got 0; allowed: a whole number of steps, from 1 on"),
        ({"every": True}, r"telemetry: every: got True"),
        ({"every": 1.5}, r"telemetry: every: got 1.5"),
        ({"modules": 3}, r"telemetry: modules: got 3; allowed: a pattern, or a list of them"),
        ({"modules": []}, r"telemetry: modules: got \[\]"),
        ({"modules": "re:("}, r"telemetry: modules: policy pattern 're:\('"),
        ({"modules": ["a", 3]}, r"telemetry: modules: policy pattern: got 3"),
        ({"to": ""}, r"telemetry: to: got ''; allowed: a folder's path"),
        ({"to": 3}, r"telemetry: to: got 3"),
        ({"to": "a\0b"}, r"telemetry: to: got 'a.x00b'; allowed: a folder's path"),
        ({"csv": 1}, r"telemetry: csv: got 1; allowed: True, False"),
        ({"tensorboard": "yes"}, r"telemetry: tensorboard: got 'yes'"),
    ]:
        with pytest.raises(ValueError, match=said):
            Config(telemetry=given)


def test_taken():
    assert telemetry_options(Config()) is None
    assert telemetry_options(Config(telemetry={})) == TelemetryOptions()
    options = Config(telemetry={"modules": ["*.down", "re:head"], "to": Path("a")})
    found = telemetry_options(options)
    assert found == TelemetryOptions(modules=("*.down", "re:head"), to="a")
    assert found.wants("layers.0.down") and found.wants("head") and not found.wants("up")


def test_from_a_file(tmp_path, monkeypatch):
    path = tmp_path / "q2.toml"
    path.write_text('[telemetry]\nevery = 10\nmodules = "*.down"\nto = "records"\n')
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(path))
    options = telemetry_options(Config.from_options())
    assert options == TelemetryOptions(10, ("*.down",), "records")
