"""Exports: the same answers as the run, what the gate refuses, what they cost, and what a server of them costs.

faults_refused, sound_accepted  planted faults that `headway export` refuses, of ten, and sound exports that it accepts,
                                of ten (bench/_export/faults.py)
int8_drop, int8_size_ratio      points of accuracy that int8 loses on digits, and its file over that of fp32
                                (bench/_export/int8.py)
ort_vs_eager_resnet18_bs1       CPU seconds of eager PyTorch over those of ONNX Runtime, one thread: ResNet-18 with 224
ort_vs_eager_cifar_resnet_bs1   pixels and `cifar_resnet`, batch 1 (bench/_export/speed.py)
ort_vs_eager_bs32               the same at batch 32, the least of three networks
int8_vs_eager_bs32              the same with int8
labels_differ                   files of 500 to which `predict.py`, in a Python without torch and Headway, gives another
                                label than `headway predict RUN`, whose two best classes are 0.01 apart or more
                                (bench/_export/labels.py)
probability_resized, probability_not_resized
                                the largest difference of a probability, of files of other sizes and of the network's
export_every_network            share of all networks of `headway.model` and engines with 0 changed answers, and equal
                                top-1 and top-5, at batches 1, 2, 3, 7 and 64 (bench/_export/exactness.py)
export_seconds                  `headway export` of a ResNet-18 with its gate over 600 images
                                (bench/_export/duration.py)
serve_vs_plain_1, serve_vs_plain_32
                                requests per CPU second of `headway serve` over those of FastAPI + Pillow + eager
                                PyTorch, at 1 and 32 clients (bench/_export/serving.py)
serve_cpu_vs_litserve           CPU seconds per request over those of LitServe: the worst of 1, 8 and 32 clients
serve_p50_1                     median latency at one client over 1.3 of the bare call + 0.5 ms
serve_lost                      requests without an answer while servers are stopped by SIGTERM under load
serve_swap_errors               requests that fail while exports are swapped, and bad ones refused, under load
serve_overload_lost, serve_overload_p99
                                requests without an answer under eight times the load, and p99 of the answers over
                                their deadline
onednn_gain_..., onednn_accuracy_delta
                                the deck's inference tables, measured here; what this machine has measured is kept
                                (bench/_export/deck_table.py)

CPU seconds are those of all threads of a process, so other programs change them less than wall time.
"""

from __future__ import annotations

from bench._common import Part, add_only, parser, run_parts
from bench._export.deck_table import compare_deck
from bench._export.duration import time_export
from bench._export.exactness import compare_networks
from bench._export.faults import compare_faults
from bench._export.int8 import compare_int8
from bench._export.labels import compare_labels
from bench._export.serving import compare_servers
from bench._export.speed import compare_speed
from bench._family import run_bench

PARTS: dict[str, Part] = {
    "gate": compare_faults,
    "int8": compare_int8,
    "speed": compare_speed,
    "labels": compare_labels,
    "exactness": compare_networks,
    "duration": time_export,
    "serve": compare_servers,
    "deck": compare_deck,
}


def main() -> None:
    asked = parser(__doc__ or "")
    add_only(asked, PARTS)
    run_parts(PARTS, asked.parse_args())


if __name__ == "__main__":
    run_bench(main)
