"""Everything that needs a GPU, in pieces of at most eight minutes.

A call runs as many pieces as fit into --minutes, and writes each into DIR/gpu-NAME.json as soon as it has ended. The
next call continues with the next piece. Pieces with a record for this device and this version of the code, in DIR or in
bench/results, are skipped (--again runs them once more); failed ones come last.

On a machine without a network, `gpu-kit` beside this folder (made by `make gpu-kit`) provides what is missing:
packages, the native core, photographs, CIFAR-10. It is unpacked at the first call.

With --dry the pieces run on the CPU with a tiny network, each bench once, and nothing is recorded. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, strftime
from typing import Any

from bench._family import run_bench
from bench._gpu import kit, records
from bench._gpu.pieces import LIMIT_MINUTES, PIECES, ROOT, Piece
from bench._gpu.run import run_piece

RESULTS = ROOT / "bench/results"


def main() -> None:
    options = arguments(PIECES).parse_args()
    if (packed := kit.find(ROOT)) is not None:
        kit.use(packed, ROOT)
    names = {piece.name for piece in PIECES}
    if unknown := set(options.pieces) - names:
        sys.exit(f"There is no piece {', '.join(sorted(unknown))}. `python -m bench.gpu --list` names them.")
    chosen = [piece for piece in PIECES if piece.name in (options.pieces or names)]
    if options.list:
        for piece in chosen:
            print(f"{piece.name:<18} {piece.answers} ({piece.minutes:g} min)")
        return
    key, about = ({}, {}) if options.dry else this_gpu()
    sys.exit(0 if run(chosen, options, key, about) else 1)


def arguments(pieces: Sequence[Piece]) -> argparse.ArgumentParser:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [piece.name for piece in pieces]
    asked.add_argument("pieces", nargs="*", metavar="PIECE", help=f"run these alone: {', '.join(names)}")
    asked.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where records go")
    asked.add_argument("--minutes", type=float, default=float("inf"), metavar="M", help="of this call (default: all)")
    asked.add_argument("--again", action="store_true", help="run recorded pieces once more")
    asked.add_argument("--dry", "--quick", action="store_true", help="on the processor, recording nothing")
    asked.add_argument("--list", action="store_true", help="print the pieces and what each answers")
    return asked


def run(pieces: Sequence[Piece], options: argparse.Namespace, key: Mapping[str, str], about: Mapping[str, Any]) -> bool:
    """Runs what is to be done in the time there is.

    Args:
        key: what a record has to share to count as done here.
        about: the machine, for the records.

    Returns:
        whether nothing failed.
    """
    tried = [piece for piece in pieces if piece.dry]
    left = tried if options.dry else records.to_do(pieces, (options.out, RESULTS), key, again=options.again)
    end, right = monotonic() + 60 * options.minutes, True
    for number, piece in enumerate(left):
        time_left = (end - monotonic()) / 60
        # The first piece of a call always begins, or a short call would never come to an end.
        if number and piece.minutes > time_left:
            print(f"{len(left) - number} pieces are left for the next call, {piece.name} first.")
            break
        print(f"{strftime('%H:%M:%S')} {piece.name}: {piece.answers}", flush=True)
        found = run_piece(piece, options.out, 60 * min(LIMIT_MINUTES, max(time_left, 0.1)), dry=options.dry)
        right = tell(piece, found, dry=options.dry) and right
        if not options.dry:
            record = {"piece": piece.name, **key, "at": strftime("%Y-%m-%d %H:%M"), **found}
            print(f"  {records.write(piece, options.out, {'machine': about, **record})}", flush=True)
    else:
        print("dry run: nothing is recorded." if options.dry else "Nothing is left to do.")
    return right


def tell(piece: Piece, found: Mapping[str, Any], *, dry: bool) -> bool:
    """Prints what a piece found. Returns whether it is done."""
    print(f"  {piece.name} {found['status']} in {found['seconds']:.0f} s{' (dry, on the processor)' if dry else ''}")
    for claim in found["claims"]:
        print(f"  {claim['name']:<24} {claim['value']:.4g} {claim['unit']}   ({claim['how']})")
    done = bool(found["status"] == "done")
    if not done:
        print("".join(f"  | {line}\n" for line in found["output"].strip().splitlines()[-15:]), end="")
    sys.stdout.flush()
    return done


def this_gpu() -> tuple[dict[str, str], dict[str, Any]]:
    """The device and the version of the code, which a record has to share to count; and the whole machine."""
    import torch

    from bench._common import machine

    if not torch.cuda.is_available():
        sys.exit("bench.gpu needs a CUDA GPU, and PyTorch sees none here. `--dry` tries it on the processor.")
    return {"device": torch.cuda.get_device_name(), "code": records.code_version(ROOT)}, machine()


if __name__ == "__main__":
    run_bench(main)
