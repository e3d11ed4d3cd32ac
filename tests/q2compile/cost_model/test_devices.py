# SPDX-License-Identifier: Apache-2.0
"""The GPUs that the cost model knows, by name, and the rates of their GEMMs."""

import pytest
import torch

from q2compile.cost_model.devices import (
    DATA_SHEETS,
    DEVICES,
    data_sheet,
    deciding_device,
    reported_devices,
    shown_devices,
)

B200, RTX5090 = DEVICES


def test_gemms_reach_their_published_rates():
    """In TFLOP/s. RTX 5090: BF16 about 225, FP4 about 830 at 8192 (vLLM 38338: 214 to 235, 801 to
    874). B200 at K = 4096: BF16 1360 to 1420, FP4 3650 to 3900 (vLLM 20646)."""
    published = {
        "B200": ((1360, 1420), (3650, 3900)),
        "RTX 5090": ((214, 235), (801, 874)),
        "RTX 5080": ((102, 103), None),
        "RTX PRO 6000": ((350, 417), None),
    }
    for device in DATA_SHEETS:
        bf16, fp4 = published.get(device.name, (None, None))
        for kind, between in (("bf16", bf16), ("fp4", fp4)):
            if between:
                assert between[0] <= device.gemms[kind].reached / 1e12 <= between[1]
    ratios = [d.gemms["fp4"].reached / d.gemms["bf16"].reached for d in (B200, RTX5090)]
    assert ratios == pytest.approx([2.78, 3.69], abs=0.02)


def test_devices_are_found_by_name():
    names = {
        "NVIDIA B200": "B200",
        "NVIDIA GB200": "GB200",
        "NVIDIA B300 SXM6 AC": "B300",
        "NVIDIA GB300": "GB300",
        "NVIDIA H200": "H200",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA GB10": "GB10",
        "NVIDIA GeForce RTX 5090": "RTX 5090",
        "NVIDIA GeForce RTX 5080": "RTX 5080",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
        # Variants with the same number and other rates.
        "NVIDIA GeForce RTX 5090 Laptop GPU": None,
        "NVIDIA GeForce RTX 5080 Laptop GPU": None,
        "NVIDIA GeForce RTX 5090 D": None,
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,
        "NVIDIA H200 NVL": None,
        "NVIDIA H100 PCIe": None,
        "NVIDIA GeForce RTX 4090": None,
    }
    found = {name: data_sheet(name) for name in names}
    assert {name: device and device.name for name, device in found.items()} == names
    assert len({device.column for device in DATA_SHEETS}) == len(DATA_SHEETS)


def test_the_device_that_decides(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, model, name in (
        ((9, 0), "H200", "B200"),
        ((10, 0), "B200", "B200"),
        ((10, 3), "B300 SXM6 AC", "B300"),
        ((12, 0), "GeForce RTX 5090 Laptop GPU", "RTX 5090"),
        ((12, 1), "GB10", "GB10"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda n=model: f"NVIDIA {n}")
        assert deciding_device().name == name


@pytest.mark.parametrize(
    ("name", "reported", "shown"),
    [
        ("H100 80GB HBM3", ["h100", "b200", "rtx5090"], ["h100", "b200"]),
        ("GeForce RTX 5090", ["rtx5090", "b200"], ["rtx5090", "b200"]),
        ("B200", ["b200", "rtx5090"], ["b200", "rtx5090"]),
        ("GeForce RTX 4090", ["b200", "rtx5090"], ["b200", "rtx5090"]),
    ],
)
def test_a_report_begins_with_the_gpu_that_is_present(monkeypatch, name, reported, shown):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: f"NVIDIA {name}")
    assert [device.column for device in reported_devices()] == reported
    rows = [{}, dict.fromkeys(reported, {})]
    assert [device.column for device in shown_devices(rows)] == shown
    assert shown_devices([{}]) == list(DEVICES)
