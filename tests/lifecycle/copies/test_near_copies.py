"""Near copies: what the hash ignores, the choice as by a slow loop, chains, and files that are really near copies."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import damage
from tests.lifecycle.mining._hashes import draw_thumbnails, make_hashes, write_copies

from headway.data import opening
from headway.data.pack import pack
from headway.lifecycle.copies import near_copies
from headway.lifecycle.copies.hash_images import hash_images
from headway.lifecycle.copies.hash_search import MAX_BITS
from headway.lifecycle.copies.image_hashes import ImageHashes, compute_dhash, join_hashes
from headway.lifecycle.copies.near_copies import (
    MIN_CORRELATION,
    find_near_copies,
    find_near_copies_of,
    group_near_copies,
)

SEEDS = st.integers(0, 10_000)


@given(SEEDS, st.integers(-40, 40))
def test_brightness_does_not_change_the_hash(seed: int, more: int) -> None:
    thumbnails = draw_thumbnails(seed, 5)
    assert (compute_dhash(thumbnails) == compute_dhash((thumbnails.astype(int) + more).astype(np.uint8))).all()


def test_each_bit_is_one_rise() -> None:
    """The first pixel of the first row is the highest bit."""
    thumbnail = np.full((1, 16, 18), 100, np.uint8)
    thumbnail[0, 0:2, 2:4] = 200
    assert compute_dhash(thumbnail).tolist() == [1 << 63]
    thumbnail[0] = np.arange(18)[None, :] * 10
    assert compute_dhash(thumbnail).tolist() == [(1 << 64) - 1]


def draw_noisy(seed: int) -> ImageHashes:
    """Thirty images: half of them are noisy copies of the others, some too noisy, and a few are damaged or equal."""
    generator = np.random.default_rng(seed)
    thumbnails = draw_thumbnails(seed, 30)
    noise = generator.normal(0, 1, size=(15, 16, 18)) * generator.uniform(0, 12, size=(15, 1, 1))
    thumbnails[15:] = np.clip(thumbnails[generator.integers(0, 15, 15)] + noise, 0, 255)
    # Shuffled, so that neighbours are pairs too.
    order = generator.permutation(30)
    # Four files have the bytes of another one, and so its pixels.
    content = np.arange(30)
    content[order[:4]] = content[order[4:8]]
    return make_hashes(
        thumbnails[order][content],
        is_good=(generator.random(30) > 0.1)[content],
        digests=content,
        resolution=generator.integers(1, 5, 30),
    )


def is_alike(hashes: ImageHashes, a: int, b: int) -> bool:
    """Whether two images are copies, one pair at a time."""
    if (hashes.digests[a] == hashes.digests[b]).all():
        return True
    bits = (int(hashes.dhash[a]) ^ int(hashes.dhash[b])).bit_count()
    correlation = np.corrcoef(hashes.thumbnails[a].ravel(), hashes.thumbnails[b].ravel())[0, 1]
    return bool(hashes.is_good[a] and hashes.is_good[b] and bits <= MAX_BITS and correlation >= MIN_CORRELATION)


@given(SEEDS, st.integers(1, 40), st.integers(1, 40), st.integers(0, 30))
def test_what_is_kept_is_that_of_a_slow_loop(seed: int, block: int, pairs: int, known: int) -> None:
    """Whatever the size of a block."""
    hashes = draw_noisy(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_copies, "_BLOCK", block)
        patch.setattr(near_copies, "_PAIRS", pairs)
        found = find_near_copies(hashes, known=known)
    order = sorted(range(known, 30), key=lambda place: (-int(hashes.resolution[place]), place))
    centres, kept = list(range(known)), list(range(30))
    for place in order:
        alike = [centre for centre in centres if is_alike(hashes, place, centre)]
        if alike:
            # An image of equal bytes may be a later centre than a near copy; both stand for the picture.
            assert found.kept[place] in alike
            kept[place] = int(found.kept[place])
        else:
            centres.append(place)
    assert found.kept.tolist() == kept
    equal = [(hashes.digests[place] == hashes.digests[kept[place]]).all() for place in range(30)]
    assert found.is_equal.tolist() == equal
    in_clusters = [place for cluster in found.clusters for place in cluster]
    assert len(in_clusters) == len(set(in_clusters))
    assert {cluster[0] for cluster in found.clusters} == set(found.kept[found.is_out].tolist())


@given(SEEDS, st.integers(0, 30))
def test_copies_in_another_set_are_those_of_a_slow_loop(seed: int, first: int) -> None:
    hashes = draw_noisy(seed)
    found = find_near_copies_of(hashes, first)
    for place, copy in zip(range(first, 30), found.tolist(), strict=True):
        alike = [other for other in range(first) if is_alike(hashes, place, other)]
        equal = [other for other in alike if (hashes.digests[place] == hashes.digests[other]).all()]
        assert copy == ([*equal, *alike, -1])[0]


@given(SEEDS)
def test_groups_join_copies_of_kept_images(seed: int) -> None:
    hashes = draw_noisy(seed)
    kept = set(find_near_copies(hashes, by_quality=False).kept.tolist())
    alike = [(a, b) for a in range(30) for b in kept if is_alike(hashes, a, b)]
    first, before = list(range(30)), list[int]()
    # Until nothing changes: each image has the first image of those that it is a copy of, and they have its.
    while first != before:
        before = list(first)
        for a, b in alike:
            first[a] = first[b] = min(first[a], first[b])
    assert group_near_copies(hashes).tolist() == first


def draw_chain() -> ImageHashes:
    """Three images: each is like the next one, and the first is unlike the last."""
    generator = np.random.default_rng(5)
    first = draw_thumbnails(1, 1)[0].astype(float)
    step = generator.normal(0, 4.5, size=(16, 18))
    chain = make_hashes(np.stack([first, first + step, first + 2 * step]).clip(0, 255))
    assert [is_alike(chain, *pair) for pair in ((0, 1), (1, 2), (0, 2))] == [True, True, False]
    return chain


def test_an_image_is_out_only_if_it_is_a_copy_of_a_kept_one() -> None:
    """A pan does not become one image."""
    chain = draw_chain()
    assert find_near_copies(chain).clusters == [[0, 1]]
    assert find_near_copies(join_hashes([chain, chain])).kept.tolist() == [0, 0, 2, 0, 0, 2]
    # Known images are kept, also if they are copies of each other.
    assert find_near_copies(chain, known=2).kept.tolist() == [0, 1, 1]
    assert find_near_copies_of(chain, 2).tolist() == [1]
    assert find_near_copies_of(chain, 1).tolist() == [0, -1]
    # For a split they are one group.
    assert group_near_copies(chain).tolist() == [0, 0, 0]


def test_the_best_resolved_is_kept_unless_another_is_known() -> None:
    thumbnails = np.repeat(draw_thumbnails(1, 1), 4, axis=0)
    hashes = make_hashes(thumbnails, resolution=[50, 200, 100, 200])
    assert find_near_copies(hashes).clusters == [[1, 0, 2, 3]]
    assert find_near_copies(hashes, known=1).clusters == [[0, 1, 2, 3]]
    assert find_near_copies(hashes, by_quality=False).clusters == [[0, 1, 2, 3]]
    assert find_near_copies(make_hashes(draw_thumbnails(2, 3), digests=[7, 7, 8])).clusters == [[0, 1]]
    assert find_near_copies(make_hashes(np.empty((0, 16, 18)))).clusters == []


def test_flat_and_damaged_images_are_copies_only_if_their_bytes_are() -> None:
    flat = np.full((4, 16, 18), 120, np.uint8)
    assert find_near_copies(make_hashes(flat)).clusters == []
    found = find_near_copies(make_hashes(flat, digests=[0, 1, 0, 0], is_good=[False] * 4))
    assert found.clusters == [[0, 2, 3]]
    assert found.is_equal.all()


def test_many_copies_of_one_picture_take_little() -> None:
    """Frames of a fixed camera: 2,000 files of different bytes, and as many of equal ones."""
    hashes = make_hashes(np.repeat(draw_thumbnails(3, 2), 1000, axis=0))
    assert [len(cluster) for cluster in find_near_copies(hashes).clusters] == [1000, 1000]
    hashes = make_hashes(np.repeat(draw_thumbnails(3, 2), 1000, axis=0), digests=np.repeat([0, 1], 1000))
    assert [len(cluster) for cluster in find_near_copies(hashes).clusters] == [1000, 1000]


@pytest.mark.parametrize("mode", ["keep", "raw"])
def test_files_that_are_near_copies(tmp_path: Path, mode: str) -> None:
    """JPEG and PNG; packed as they are, and as pixels of one size."""
    write_copies(tmp_path / "files" / "unknown")
    pack(tmp_path / "files", tmp_path / "pack", mode="keep" if mode == "keep" else "raw,resize=96", threads=1)
    with closing(opening.open(tmp_path / "pack")) as dataset:
        hashes = hash_images(dataset, threads=1)
        names = [Path(dataset.name(place)).stem for place in range(len(dataset))]
        found = find_near_copies(hashes)
    assert hashes.is_good.all()
    assert sorted(len(cluster) for cluster in found.clusters) == [5] * 6
    for cluster in found.clusters:
        assert len({names[place].partition("-")[0] for place in cluster}) == 1
        if mode == "keep":
            assert not names[cluster[0]].endswith("half"), "the best resolved one is kept"
    joined = join_hashes([hashes, hashes])
    assert len(joined) == 60
    assert all(len(cluster) == 10 for cluster in find_near_copies(joined).clusters)


def test_a_damaged_image_is_not_a_copy(tmp_path: Path) -> None:
    write_copies(tmp_path / "files" / "unknown")
    pack(tmp_path / "files", tmp_path / "pack", mode="keep", threads=1)
    damage(tmp_path / "pack", 3)
    with closing(opening.open(tmp_path / "pack")) as dataset:
        seen: list[tuple[int, int]] = []
        hashes = hash_images(dataset, threads=2, progress=lambda done, total: seen.append((done, total)))
    assert np.flatnonzero(~hashes.is_good).tolist() == [3]
    assert seen[-1] == (30, 30)
    assert not find_near_copies(hashes).is_out[3]
