"""The doctor's page: every picture holds the profile's numbers, is left out without them, and is drawn by a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor._profile import ceilings, knobs, profile, runs
from tests.page.test_browser import open_in_browser

from headway.core.profile import JointTiming, Profile, ThreadScaling
from headway.doctor.profile_page import SECTIONS, build_panels, write_page
from headway.doctor.roofline import SAME_SIZE
from headway.doctor.terminal_text import compute_stage_rates
from headway.page import renderer
from headway.page.panel import Panel

TOGETHER = JointTiming(input_alone=290e-6, loop_alone=240e-6, input_beside=330e-6, loop_beside=251e-6, cores=4)
OPTIONAL = {"threads", "sizes", "launch", "flops", "runs", "not-measured", "ranks"}
BARE: dict[str, Any] = {
    "ceilings": (),
    "together": None,
    "threads": None,
    "launch": {},
    "multiply_adds": None,
    "facts": {},
    "measured": None,
    "runs": (),
    "knobs": (),
    "environment": (),
    "not_measured": (),
    "machine": {},
}


def found(shown: Profile) -> dict[str, Panel]:
    return {one.name: one for one in build_panels(shown)}


def series(panel: Panel) -> dict[str, dict[float, float]]:
    return {one["name"]: dict(zip(one["x"], one["y"], strict=True)) for one in panel.data["series"]}


def test_a_profile_on_disk_gives_the_same_page_each_time(tmp_path: Path) -> None:
    shown = profile()
    shown.write(tmp_path / "profile.json")
    write_page(shown, tmp_path / "one.html")
    write_page(Profile.read(tmp_path / "profile.json"), tmp_path / "other.html")
    page = (tmp_path / "one.html").read_bytes()
    assert page == (tmp_path / "other.html").read_bytes()
    assert b"host/IO limited" in page
    with pytest.raises(FileNotFoundError):
        write_page(shown, tmp_path / "absent" / "page.html")


def test_what_is_not_in_the_profile_is_not_drawn() -> None:
    whole, bare = found(profile(facts=profile().facts | {"rank 0 seconds a step": 0.03})), found(profile(**BARE))
    assert whole.keys() - bare.keys() == OPTIONAL
    assert {one.section for one in whole.values()} == set(SECTIONS)
    html = renderer.render(list(bare.values()), title="T", subtitle="S")
    assert html.count("Nothing recorded.") == len({"pipeline", "anatomy", "ceilings", "run-table", "knobs"}) + len(
        {"environment", "machine", "facts"}
    )


def test_the_verdict_stands_first() -> None:
    shown = profile()
    card = found(shown)["verdict"]
    values = {one["label"]: (one["value"], one["note"]) for one in card.data["cards"]}
    assert values["limit"] == ("decode", "host/IO limited")
    assert values["predicted images/s"][0] == "3,120"
    assert values["measured images/s"] == ("2,980", "the prediction is +4.7 % off: confirmed")
    assert values["at most"][0] == "1.34 times"
    assert values["best knob"] == ("1.31 times", "images decoded once: data.cache=memory")
    assert card.note == shown.verdict.sentence
    assert build_panels(shown)[0] == card


def test_runs_that_contradict_each_other_confirm_nothing() -> None:
    faster = [one.model_copy(update={"predicted": 900.0}) if one.name == "replay" else one for one in runs()]
    card = found(profile(runs=faster).mark_contradictions())["verdict"]
    assert "the prediction is +4.7 % off: not confirmed" in [one["note"] for one in card.data["cards"]]
    assert card.note.endswith("Examine again when it is quiet.")


def test_a_bar_for_each_stage_and_a_line_for_now_and_for_the_best_knob() -> None:
    for shown in (profile(), profile(ranks=4)):
        chart, bars = found(shown)["pipeline"], compute_stage_rates(shown)
        stacks = chart.data["stacks"]
        assert [one["name"] for one in stacks] == ["loader", "training loop", "stalls", "together"]
        assert [max(values) for values in zip(*(one["values"] for one in stacks), strict=True)] == [
            bar.images_s for bar in bars
        ]
        assert [sum(value > 0 for value in one["values"]) for one in stacks] == [4, 5, 2, 3]
        assert "decode (the limit)" in chart.data["names"]
        assert "compute (next)" in chart.data["names"]
        assert [rule["at"] for rule in chart.data["rules"]] == [2980.0, knobs()[0].images_s]
    rules = found(profile(measured=None, knobs=()))["pipeline"].data["rules"]
    assert rules == [{"name": "predicted: 3,120", "at": 3120.0}]


def test_a_step_is_made_of_its_stages() -> None:
    chart = found(profile())["anatomy"]
    assert chart.data["names"] == ["loader", "training loop", "stalls"]
    for place, side in enumerate(("input", "loop", "stall")):
        total = sum(part["values"][place] for part in chart.data["stacks"])
        assert total == pytest.approx(128e3 * sum(one.seconds for one in ceilings() if one.side == side))
    assert all(sum(value > 0 for value in part["values"]) == 1 for part in chart.data["stacks"])


@given(st.floats(0, 1e-3), st.floats(1e-6, 1e-3))
@settings(deadline=None)
def test_the_fit_of_the_threads_goes_through_its_points(serial: float, parallel: float) -> None:
    counts = (1, 2, 4, 8)
    rates = tuple(1 / (serial + parallel / count) for count in counts)
    fitted = ThreadScaling(threads=counts, images_s=rates, serial_s=serial, parallel_s=parallel)
    chart = found(profile(threads=fitted, together=TOGETHER))["threads"]
    drawn = series(chart)
    fit = drawn["fit"]
    assert list(fit) == [1, 2, 3, 4]  # more threads than cores share them, and the fit does not hold
    for count in (1, 2, 4):
        assert fit[count] == pytest.approx(drawn["measured"][count])
    assert drawn["the loop alone"] == {1: 1 / 240e-6, 8: 1 / 240e-6}
    assert list(series(found(profile(threads=fitted, together=None))["threads"])["fit"]) == list(range(1, 9))
    assert chart.data["y_range"][1] > max(rates)


def test_rates_by_image_size() -> None:
    shown = profile()
    drawn = series(found(shown)["sizes"])
    loader, loop = drawn["loader, computed"], drawn["training loop, computed"]
    own = {bar.name: bar.images_s for bar in compute_stage_rates(shown)}
    assert loader[32.0] == pytest.approx(own["loader together"])
    assert loop[32.0] == pytest.approx(own["training loop together"])
    assert loader[64] == pytest.approx(own["loader together"] / 4)
    assert loader[512] == pytest.approx(own["loader together"] / 256)
    fixed = sum(one.seconds for one in ceilings() if one.stage in ("launch", "optimizer", "other"))
    assert 1 / loop[64] == pytest.approx(fixed + 4 * (1 / loop[32.0] - fixed))
    assert drawn["measured, at 32 x 32"] == {32.0: 2980.0}
    assert "measured" not in " ".join(series(found(profile(measured=None))["sizes"]))


def test_images_of_another_size_than_the_batch_are_stored_and_decoded_as_they_are() -> None:
    """Another crop of them is no other set."""
    same, stored = profile(), ("storage", "decode")
    assert "and so do those of storage and decode;" in found(same)["sizes"].note
    unknown = {name: value for name, value in same.facts.items() if name != SAME_SIZE}
    fixed = sum(one.seconds for one in ceilings() if one.stage in stored)
    for facts in (same.facts | {SAME_SIZE: 0.0}, unknown):
        chart = found(profile(facts=facts))["sizes"]
        loader = series(chart)["loader, computed"]
        assert loader[32.0] == pytest.approx(series(found(same)["sizes"])["loader, computed"][32.0])
        assert 1 / loader[64] == pytest.approx(fixed + 4 * (1 / loader[32.0] - fixed))
        assert "but not those of storage and decode" in chart.note


def test_the_line_by_batch_starts_from_what_a_step_takes_whatever_its_batch() -> None:
    chart = found(profile())["launch"]
    drawn = series(chart)
    assert list(drawn["measured"]) == [8.0, 32.0, 128.0, 512.0]  # in their order, whatever that of the texts
    assert drawn["line"][0.0] == pytest.approx(128e3 * 21e-6)
    assert drawn["line"][512.0] == pytest.approx(128e3 * 21e-6 + 512e3 * 190e-6)
    assert "at 2.69 ms, the fixed time of a step: 10 % of" in chart.note
    alone_drawn = found(profile(ceilings=()))["launch"]
    assert list(series(alone_drawn)) == ["measured"]


def test_the_roofline_of_the_arithmetic() -> None:
    facts = profile().facts
    drawn = series(found(profile())["flops"])
    (reached,) = drawn["this network"].values()
    assert reached == pytest.approx(6 * 41e6 / (190e-6 + 21e-6))
    roof = drawn["roof, measured"]
    knee = facts["peak_flops"] / facts["peak_bytes_s"]
    assert roof[knee] == facts["peak_flops"]
    assert roof[8.0] == pytest.approx(8 * facts["peak_bytes_s"])
    assert min(roof) <= 80 <= max(roof)
    assert "56 % of the measured peak, and 69 % of the roof above, set by the memory" in found(profile())["flops"].note
    flat = {name: value for name, value in facts.items() if name != "peak_bytes_s"}
    assert set(series(found(profile(facts=flat))["flops"])["roof, measured"].values()) == {2.1e12}
    for missing in ("peak_flops", "intensity"):
        fewer = {name: value for name, value in facts.items() if name != missing}
        assert "flops" not in found(profile(facts=fewer))
    assert "flops" not in found(profile(multiply_adds=None))


def test_runs_stand_in_pairs_and_one_that_was_not_run_says_why() -> None:
    panels_found = found(profile())
    chart, table = panels_found["runs"], panels_found["run-table"]
    assert chart.data["names"] == [
        "synthetic, measured", "replay, predicted", "replay, measured", "warm, predicted", "warm, measured",
    ]  # fmt: skip
    assert [sum(part) for part in zip(*(one["values"] for one in chart.data["stacks"]), strict=True)] == [
        4740, 4158, 4100, 3182, 3040,
    ]  # fmt: skip
    rows = {row[0]: row[1:] for row in table.data["rows"]}
    assert rows["warm"][1:] == ["140", "3,182", "3,040", "3,010", "3,076", "+4.7 %", "31 %"]
    assert rows["cold"][2:] == ["-"] * 6
    assert rows["cold"][0] == "the whole set was brought into memory before the first step"


def test_tables_hold_what_the_profile_holds() -> None:
    shown = profile()
    made = found(shown)
    assert [row[1] for row in made["knobs"].data["rows"]] == [one.override or "no key of the recipe" for one in knobs()]
    assert [row[0] for row in made["ceilings"].data["rows"]] == [one.stage for one in ceilings()]
    cures = [row[1] for row in made["environment"].data["rows"]]
    assert cures == ["Unset it, or set it to 2.", "Set data.cache=disk.", "-", "-"]
    machine = dict(made["machine"].data["rows"])
    assert machine["memory"] == "8.59 GB"
    assert machine["versions.torch"] == "2.13.0"
    assert len(made["facts"].data["rows"]) == len(shown.facts) + 1
    assert made["not-measured"].data["rows"] == [[what] for what in shown.not_measured]


def test_ranks_stand_in_their_order() -> None:
    facts = {
        "rank 10 seconds a step": 0.04,
        "rank 2 seconds a step": 0.03,
        "rank two seconds": 1.0,
        "syncs a step": 0.0,
    }
    chart = found(profile(ranks=2, facts=facts))["ranks"]
    assert chart.data["names"] == ["rank 2", "rank 10"]
    assert chart.data["stacks"][0]["values"] == [30.0, 40.0]


@pytest.mark.browser
@pytest.mark.check
def test_a_browser_draws_every_chart(tmp_path: Path) -> None:
    page = tmp_path / "doctor.html"
    ranks = {f"rank {rank} seconds a step": 0.03 + rank / 1e3 for rank in range(4)}
    shown = profile(facts=profile().facts | ranks)
    write_page(shown, page)
    document, console = open_in_browser(page, "--disable-3d-apis", "--window-size=1400,900")
    assert console == []
    articles = dict(re.findall(r'<article id="([^"]+)"(.*?)</article>', document, re.DOTALL))
    for name in ("pipeline", "anatomy", "threads", "sizes", "launch", "flops", "runs", "ranks"):
        assert 'class="main-svg"' in articles[name], name
    assert articles["pipeline"].count('class="point"') >= len(compute_stage_rates(shown))
    labels = re.findall(r'class="annotation-text"[^>]*>([^<]*)<', articles["pipeline"])
    assert labels == ["measured: 2,980", "with images decoded once: 4,087"]
    assert articles["pipeline"].count('class="shapelayer"') >= 1
    assert ">decode (the limit) <" in articles["pipeline"]
