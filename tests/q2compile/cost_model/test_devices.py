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
    """In TFLOP/s; the sources are beside the constants. Within a hundredth of each end."""
    published = {
        "B200": {"bf16": (1360, 1513), "fp4": (3646, 5234)},
        "B300": {"fp4": (4551, 5800)},
        "RTX 5090": {"bf16": (185, 235), "fp4": (758, 1355)},
        "RTX 5080": {"fp4": (405, 730)},
        "RTX PRO 6000": {"bf16": (350, 417), "fp4": (907, 1629)},
        "H200": {"bf16": (685, 764)},
    }
    for device in DATA_SHEETS:
        for kind, (low, high) in published.get(device.name, {}).items():
            reached = device.gemms[kind].reached
            found = [reached.low / 1e12, reached.high / 1e12]
            assert found == pytest.approx([low, high], rel=0.01)


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
