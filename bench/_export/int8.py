"""What int8 costs: networks are trained on digits and exported with the gate at 0.5 points.

ResNet-20 on 16 pixels with three seeds, and ResNet-18 on 64 pixels with one. The files of fp32 and int8 are compared,
and the accuracies on 539 held-out pictures. The gate may return layers to fp32; the table shows how many.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench._common import Claim, table
from bench._export.faults import export
from bench._export.pictures import pack_pictures, train_network

RUNS = (
    ("ResNet-20", 16, {"factory": "headway.model:cifar_resnet", "args": {"depth": 20}}, 8, (0, 1, 2)),
    ("ResNet-18", 64, {"factory": "headway.model:resnet18", "args": {}}, 4, (0,)),
)
"""Name, side of the images, recipe of the network, epochs, seeds."""


def compare_int8(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Trains, exports, and returns the mean drop, and the ratio of the files of ResNet-18."""
    packed = pack_pictures(folder)
    rows = [
        ("network", "seed", "accuracy", "int8", "drop", "upper 95 % bound", "flips", "layers in fp32", "size ratio")
    ]
    drops, ratios = list[float](), dict[str, float]()
    for name, side, model, epochs, seeds in RUNS[:1] if options.quick else RUNS:
        for seed in seeds[: 1 if options.quick else None]:
            run = train_network(
                packed,
                folder / "runs" / f"{name}-{seed}",
                seed=seed,
                data={"size": side},
                model=model,
                epochs=1 if options.quick else epochs,
            )
            out = folder / f"export-{name}-{seed}"
            status, targets, said = export(run, out, "--to", "onnx,int8")
            if "int8" not in targets:
                raise SystemExit(f"the export of {name}, seed {seed}, left with status {status}: {said}")
            entry = targets["int8"]
            check, about = entry["gate"]["checks"][0], entry["about"]
            drops.append(check["drop"])
            # The last seed counts.
            ratios[name] = (out / entry["file"]).stat().st_size / (out / targets["onnx"]["file"]).stat().st_size
            rows.append(
                (
                    name,
                    str(seed),
                    f"{check['reference']:.4f}",
                    f"{check['value']:.4f}",
                    f"{check['drop']:+.2f}",
                    f"{check['bound']:.2f}",
                    str(check["flips"]),
                    f"{len(about['in_fp32'])} of {about['layers']}" + ("" if check["passed"] else ", REJECTED"),
                    f"{ratios[name]:.3f}",
                )
            )
    table(rows)
    names = " and ".join(f"{name} of {side} pixels" for name, side, *_ in RUNS if name in ratios)
    how = f"{names} on digits, {len(drops)} runs, ONNX Runtime, {check['samples']} held-out pictures"
    sizes = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    return [
        Claim("int8_drop", max(drops), "points", f"the largest; accuracy of fp32 less that of int8; {how}"),
        Claim("int8_size_ratio", list(ratios.values())[-1], "", f"int8.onnx over model.onnx: {sizes}; {how}"),
    ]
