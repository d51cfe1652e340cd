"""The loop around training: versions of data sets, annotations, mining of what to label next, and the index of runs.

histories_equal, histories_undone, splits_moved
                                random histories of requests with equal end content: share with equal IDs; share in
                                which each difference, undone, gave the parent; samples whose split changed
                                (bench/_lifecycle/versions.py)
store_open_ms                   `headway.open` of a version of a million samples
store_relabel_s                 CPU seconds to change one of a million labels
store_bytes_a_sample            size of the columns of such a version
store_vs_pack                   CPU seconds of training from a version over training from a pack
annotations_equal               share of the formats (COCO, CVAT, Label Studio, JSON lines) that give back what they got
annotations_cpu_s               CPU seconds to write and read 10,000 images, the slowest format
                                (bench/_lifecycle/interchange.py)
croissant_valid                 share of descriptions, of packs and of a version, that `mlcroissant validate` accepts
labels_to_random_320_plain      labels after which mining by margin, with a fifth of its picks random, is as accurate on
labels_to_random_320_rare       held-out digits as 320 random labels are: a plain pool, one in which three classes are
labels_to_random_320_copies     rare, and one of 70 % near copies, which are taken out first
                                (bench/_lifecycle/labels.py)
label_error_precision           share of wrong labels among the suspects, and of suspects among the wrong labels:
label_error_recall              digits, 5 % uniform noise, out-of-sample probabilities
                                (bench/_lifecycle/label_errors.py)
label_noise_error               |estimated - true| noise over the true one
near_copies_cpu_s               CPU seconds of comparing 20,000 images (bench/_lifecycle/near_copies.py)
near_copies_found               share of planted copies that are found: half the size, quality 50, brightness +-10 %
near_copies_false               pairs of different photographs over all pairs that are found
near_copies_addition_ms         CPU milliseconds an image that the search adds to an addition to a store
index_rebuild_s                 CPU seconds of building the index of 1,000 runs with a million values
index_list_ms                   a list of all of them with the usual columns (bench/_lifecycle/index.py)
index_series_ms                 100 series of them
index_unchanged_ms              an update that finds nothing new
index_identical                 1 if an index has the same content and gives the same list after deletion and rebuild
upload_mb_s, upload_cpu_s_gb    an upload to `headway serve-data` over the loopback, with SHA-256 and fsync, in MB/s;
upload_memory_mb                CPU seconds of the server for each GB; memory above that before, with a file of 2 GB
                                (bench/_lifecycle/uploads.py)
addition_mb_s                   a tar file of 2 GB of images, from its first byte to its version, and memory above that
addition_memory_mb              before
commits_s, commit_cpu_ms        versions a second that eight clients make, CPU of the server for each, requests without
commits_lost, commits_failed    a version, and answers 5xx
upload_kills_lost               uploads that did not make the same version after kills of the server, and after cut
upload_cuts_lost                connections; bytes that were sent again (bench/_lifecycle/kills.py)
upload_resent_share
loop_demo_s, loop_demo_cpu_s    `make loop-demo`, from its first command to the lineage of its network: wall and CPU s
loop_gain_points                accuracy that its two rounds of labels have brought (bench/_lifecycle/loop.py)
loop_lineage                    1 if the lineage names the version, its labels, and who set them
walk_gain_points                300 photographs, half of them labelled: accuracy after two rounds over that before
walk_s                          wall seconds of all commands of that walk (bench/_lifecycle/walk.py)
label_key_ms_p95                milliseconds from a key on the label page to the next image, and from Enter to the
label_grid_ms_p95               next 24, in headless Chromium (bench/_lifecycle/label_page.py)
label_key_cpu_ms                CPU of the page's main thread for each key
label_open_s                    seconds until a data set of 100,000 samples shows its first grid
labels_lost, labels_doubled     of 240 labels by keys, while the server was killed twice

CPU seconds are those of all threads of a process, so other programs change them less than wall time.
"""

from __future__ import annotations

from bench._common import Part, add_only, parser, run_parts
from bench._family import run_bench
from bench._lifecycle.index import measure_index
from bench._lifecycle.interchange import compare_interchange
from bench._lifecycle.kills import measure_kills
from bench._lifecycle.label_errors import measure_label_errors
from bench._lifecycle.label_page import measure_label_page
from bench._lifecycle.labels import count_labels
from bench._lifecycle.loop import measure_loop
from bench._lifecycle.near_copies import measure_near_copies
from bench._lifecycle.uploads import measure_additions, measure_commits, measure_uploads
from bench._lifecycle.versions import compare_histories, compare_with_pack, time_large_version
from bench._lifecycle.walk import measure_walk

PARTS: dict[str, Part] = {
    "histories": compare_histories,
    "large": time_large_version,
    "training": compare_with_pack,
    "interchange": compare_interchange,
    "labels": count_labels,
    "label_errors": measure_label_errors,
    "near_copies": measure_near_copies,
    "index": measure_index,
    "upload": measure_uploads,
    "additions": measure_additions,
    "commits": measure_commits,
    "kills": measure_kills,
    "loop": measure_loop,
    "walk": measure_walk,
    "label_page": measure_label_page,
}


def main() -> None:
    asked = parser(__doc__ or "")
    add_only(asked, PARTS)
    run_parts(PARTS, asked.parse_args())


if __name__ == "__main__":
    run_bench(main)
