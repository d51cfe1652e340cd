"""What the doctor says fits a terminal, holds the numbers of the profile, and leaves nothing out in silence."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor._profile import ceilings, knobs, profile, runs

from headway.core.profile import UNCONFIRMED, EnvironmentFinding, PipelineSide, Profile, StageCeiling, Verdict
from headway.doctor import knob_search
from headway.doctor.terminal_text import (
    BLOCKS,
    COLUMNS,
    NOT_MEASURED,
    STAGES,
    compute_stage_rates,
    format_number,
    format_profile,
)
from headway.doctor.throughput_model import ThroughputModel
from headway.doctor.verdict import AUGMENT_NOTE, conclude_verdict

WORDS = ("", "a", "two words.", "a\nline", "\u00e4 long", "x" * 130, "all of a sentence " * 12, "a-b=c " * 30)
SENTENCE = st.sampled_from(WORDS) | st.text(max_size=20)
SIDES: tuple[PipelineSide, ...] = ("input", "loop", "stall")


def ceiling(stage: str, seconds: float, side: PipelineSide = "loop") -> StageCeiling:
    return StageCeiling(stage=stage, side=side, resource="device", seconds=seconds, how="")


def drawn(found: Profile) -> dict[str, tuple[float, str]]:
    """(columns of the bar, what follows the number) by name."""
    rows = re.findall(r"^  (\S[^\u2588\n]*?) +(\u2588\S*) +([\d,.]+)(.*)$", format_profile(found), re.MULTILINE)
    return {name: (BLOCKS.index(bar[-1]) / 8 + len(bar) - 1, rest.strip()) for name, bar, _, rest in rows}


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any that the schema allows, long names and many rows above all."""
    stages = draw(st.lists(st.tuples(st.sampled_from(SIDES), st.just(0.0) | st.floats(1e-9, 10)), max_size=30))
    findings = st.builds(EnvironmentFinding, what=SENTENCE, cure=SENTENCE)
    settings = [
        draw(st.sampled_from(knobs())).model_copy(update={"name": draw(SENTENCE), "cost": draw(SENTENCE)})
        for _ in range(draw(st.integers(0, 15)))
    ]
    concluded = Verdict(
        kind="host/IO limited", stage="stage 0", sentence=draw(SENTENCE), next_stage=draw(st.sampled_from(["", "s"])),
        most=draw(st.floats(1, 1e6)), confirmed=draw(st.booleans()), unexplained=draw(SENTENCE),
    )  # fmt: skip
    ran = [one.model_copy(update={"note": draw(SENTENCE)}) for one in runs() * draw(st.integers(0, 3))]
    return profile(
        name=draw(SENTENCE),
        ranks=draw(st.integers(1, 4096)),
        ceilings=[ceiling(f"stage {place}", seconds, side) for place, (side, seconds) in enumerate(stages)],
        environment=draw(st.lists(findings, max_size=12)),
        runs=ran,
        knobs=settings,
        verdict=concluded,
        measured=draw(st.none() | st.floats(1e-3, 1e9)),
        not_measured=draw(st.lists(SENTENCE, max_size=12)),
    )


@given(profiles(), st.booleans())
@settings(deadline=None)
def test_it_fits_a_terminal(found: Profile, blocks: bool) -> None:
    lines = format_profile(found, blocks=blocks).split("\n")
    assert len(lines) <= 60
    assert max(map(len, lines)) <= COLUMNS


def test_where_everything_is_long_each_part_keeps_its_lines() -> None:
    long = "words without end " * 50
    full = profile(
        ceilings=[ceiling(f"stage {place}", 1.0 + place) for place in range(40)],
        environment=[EnvironmentFinding(what=f"Fault {place}.", cure="Cure.") for place in range(40)],
        runs=runs() * 9,
        knobs=knobs()[:1] * 40,
        verdict=profile().verdict.model_copy(update={"sentence": long, "unexplained": long}),
        not_measured=["A thing."] * 40,
    )
    said = format_profile(full).split("\n")
    assert len(said) == 60
    assert said.count("  ... and 35 more, in the profile.") == 1  # faults
    assert said.count("  ... and 36 more, in the profile.") == 1  # knobs, two lines each
    assert said.count("  ... and 37 more, in the profile.") == 1  # what could not be measured
    assert said.count("  ... and 33 more, in the profile.") == 1  # runs, and a line on both together


def test_it_says_what_limits_and_how_far_the_prediction_is_off() -> None:
    said = format_profile(profile())
    assert said.startswith("cifar10, later epochs, batch 128: host/IO limited\n")
    assert "Limit: decode, then compute.\n" in said
    assert "Predicted 3,120 images/s, measured 2,980 (+4.7 %), both with computed stalls." in said
    assert re.search(r"^  warm +3,182 +3,040 +\+4\.7 % +31 %  the whole job", said, re.MULTILINE)
    assert re.search(r"^  replay +4,158 +4,100 +\+1\.4 % +0 %  ", said, re.MULTILINE)
    assert "\n  cold       not run: the whole set was brought into memory before the first step\n" in said
    assert "While both run on 2 cores, the loader takes 1.14 and the loop 1.05 times as long as alone." in said
    assert said.endswith("The examination took 61.3 s.")
    steady = [one for one in ceilings() if one.side != "stall"]
    assert "Predicted 3,120 images/s, measured 2,980 (+4.7 %)." in format_profile(profile(ceilings=steady))


def test_a_verdict_that_is_not_confirmed_says_so() -> None:
    found = profile()
    doubtful = found.verdict.model_copy(update={"confirmed": False, "unexplained": "9% is not explained."})
    said = format_profile(found.model_copy(update={"verdict": doubtful, "measured": 2500.0}))
    assert "measured 2,500 (+24.8 %), both with computed stalls: not confirmed.\n9% is not explained.\n" in said
    assert "measured?" in said
    assert not re.search(r"measured\?|computed\?", format_profile(found))
    assert "Predicted 3,120 images/s; no run was measured to confirm it." in format_profile(profile(measured=None))


def test_runs_that_contradict_each_other_are_told() -> None:
    faster = [one.model_copy(update={"predicted": 900.0}) if one.name == "replay" else one for one in runs()]
    said = format_profile(profile(runs=faster).mark_contradictions())
    assert "measured 2,980 (+4.7 %), both with computed stalls: not confirmed.\nThe short runs" in said
    assert "contradict each other by 4.8 times; other work on the machine" in said
    assert said.splitlines()[1].startswith("Not confirmed: The run is ")
    assert "contradict" not in format_profile(profile().mark_contradictions())


def test_every_override_can_be_copied() -> None:
    said = format_profile(profile())
    for knob in knobs():
        assert knob.override in said
    assert re.search(r"^  images decoded once +4,087 +1\.31  measured  data\.cache=memory$", said, re.MULTILINE)
    assert re.search(
        r"^  a larger batch .*  batch=512$\n    It changes the recipe's mathematics\. It costs: ", said, re.M
    )
    assert re.search(r"^  a processor with more cores .* computed  no key of the recipe$", said, re.MULTILINE)
    many = tuple(knobs()[0].model_copy(update={"name": f"knob {place}"}) for place in range(9))
    cut = format_profile(profile(knobs=many))
    assert "  ... and 5 more, in the profile." in cut  # two lines each, and one for these words
    assert "knob 3" in cut
    assert "knob 4" not in cut
    assert "No other setting of the recipe is known to help." in format_profile(profile(knobs=()))


def test_no_sentence_of_the_doctor_is_cut() -> None:
    """Neither the costs of all changes, nor a verdict with a line of the user's code that no run confirmed."""
    costs = [cost for name, cost in vars(knob_search).items() if name.endswith("_COST")]
    assert len(costs) > 5
    for cost in costs:
        knob = knobs()[0].model_copy(update={"cost": cost, "exact": False})
        said = " ".join(format_profile(profile(knobs=(knob,))).split())
        assert f"It changes the recipe's mathematics. It costs: {cost}." in said
    sentence = (
        "The run is host/IO limited: the fixed time of forward and backward (sleep at my_networks/attention.py:241 in "
        "forward_with_cached_keys: 71% of it) takes 39% of its time. Without that it would give at most 1.65 times the "
        f"images/s, and crop, flip and shift while decoding would limit it.{UNCONFIRMED}"
    )
    unexplained = (
        "23% of the whole job's time is not explained by its stages, not even with loader and loop at once; the fixed "
        "time of forward and backward takes 1.4 times as long there as alone."
    )
    verdict = profile().verdict.model_copy(update={"sentence": sentence, "unexplained": unexplained})
    said = " ".join(format_profile(profile(verdict=verdict)).split())
    assert " ".join(sentence.split()) in said
    assert unexplained in said


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_gpu_has_kernel_launches(device: str) -> None:
    model = ThroughputModel({"input": {}, "loop": {"launch": 2.0, "compute": 1.0}, "stall": {}}, 1.0, 1.0)
    sentence = conclude_verdict(model, device, None).sentence
    assert "launch limited: the fixed time of forward and backward" in sentence
    assert ("(kernel launches)" in sentence) == (device == "cuda")


def test_faults_stand_with_their_cures_and_the_rest_is_counted() -> None:
    said = format_profile(profile())
    assert (
        "Environment: 2 faults to fix; 2 more facts without a fault are in the profile\n  - OMP_NUM_THREADS is 1,"
        in said
    )
    assert "Unset it, or set it to 2." in said
    assert "AVX2" not in said
    well = tuple(one for one in profile().environment if not one.cure)
    assert "Environment: no faults; the profile lists the 2 facts that were checked." in format_profile(
        profile(environment=well)
    )
    missing = tuple(f"thing {place}" for place in range(NOT_MEASURED + 3))
    assert "  - thing 2\n  ... and 5 more, in the profile.\n" in format_profile(profile(not_measured=missing))
    assert "Not measured" not in format_profile(profile(not_measured=()))


def test_bars_are_as_long_as_the_logarithm_and_the_limit_is_marked() -> None:
    found = profile(
        ceilings=[ceiling(name, 1 / rate) for name, rate in (("decode", 30), ("compute", 3000), ("c", 3e5))]
    )
    bars = drawn(found)
    assert [bars[name][1] for name in ("decode", "compute", "c")] == ["\u25c4 the limit", "\u25c4 next", ""]
    steps = bars["compute"][0] - bars["decode"][0], bars["c"][0] - bars["compute"][0]
    assert steps[0] == pytest.approx(steps[1], abs=1 / 4)
    assert steps[0] == pytest.approx(42 * 2 / 4.477, abs=1 / 8)  # from 10 to 300,000, two powers of ten each
    plain = format_profile(found, blocks=False)
    assert plain.isascii()
    assert re.search(r"^  decode +#{4} +30 < the limit$", plain, re.MULTILINE)


def test_of_many_stages_the_slowest_are_drawn() -> None:
    found = profile(ceilings=[ceiling(f"stage {place}", 1.0 + place) for place in range(2 * STAGES)])
    said = format_profile(found)
    assert f"the slowest {STAGES - 1} of {2 * STAGES + 1}" in said
    assert "  stage 0 " not in said
    assert f"  stage {2 * STAGES - 1} " in said
    assert "Each stage alone" not in format_profile(profile(ceilings=()))


@given(st.lists(st.tuples(st.sampled_from(SIDES), st.floats(1e-9, 10)), max_size=12), st.integers(1, 64))
@settings(deadline=None)
def test_what_a_side_gives_together_is_the_sum_of_its_seconds(
    parts: list[tuple[PipelineSide, float]], ranks: int
) -> None:
    found = profile(
        ranks=ranks, ceilings=[ceiling(f"s{place}", taken, side) for place, (side, taken) in enumerate(parts)]
    )
    bars = compute_stage_rates(found)
    assert sum(not bar.several for bar in bars) == len(parts)
    for side in SIDES:
        stages = [bar for bar in bars if bar.side == side and not bar.several]
        together = [bar for bar in bars if bar.side == side and bar.several]
        assert len(together) == (len(stages) > 1)
        for bar in together:
            assert 1 / bar.images_s == pytest.approx(sum(1 / one.images_s for one in stages))
            assert bar.images_s == pytest.approx(ranks / sum(taken for of, taken in parts if of == side))


def test_a_stage_that_takes_nothing_is_no_ceiling() -> None:
    assert "sync" not in [bar.name for bar in compute_stage_rates(profile())]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (0.04512, "0.0451"),
        (12.34, "12.3"),
        (99.96, "100"),
        (100.4, "100"),
        (3120.4, "3,120"),
        (2e7, "20,000,000"),
    ],
)
def test_numbers_are_short(value: float, said: str) -> None:
    assert format_number(value) == said


def test_a_run_that_is_not_what_the_stages_say_is_said_first_and_once() -> None:
    warm = next(one for one in runs() if one.name == "warm").model_copy(update={"predicted": 100.0})
    concluded = conclude_verdict(
        ThroughputModel({"input": {"decode": 2e-3}, "loop": {"compute": 1e-2}, "stall": {}}, 1, 1), "cpu", warm
    )
    assert concluded.sentence.endswith(UNCONFIRMED)
    doubted = profile(runs=(warm,), verdict=concluded).mark_contradictions()
    assert doubted.verdict.sentence == "Not confirmed: " + concluded.sentence.removesuffix(UNCONFIRMED)
    assert doubted.verdict.unexplained == concluded.unexplained != ""
    assert doubted.mark_contradictions() == doubted
    assert " ..." not in format_profile(doubted).split("\n\n")[0]


@pytest.mark.parametrize(
    ("share", "said"), [(0.5, "has 2.00 times the images/s"), (2.0, "50% of the whole job's time")]
)
def test_a_run_is_compared_with_its_prediction_in_its_own_unit(share: float, said: str) -> None:
    """Predicted half: the run has twice the images/s. Predicted twice: half of its time is unexplained."""
    warm = next(one for one in runs() if one.name == "warm")
    assert warm.images_s is not None
    warm = warm.model_copy(update={"predicted": share * warm.images_s.value})
    model = ThroughputModel({"input": {"decode": 2e-3}, "loop": {"compute": 1e-2}, "stall": {}}, 1, 1)
    assert said in conclude_verdict(model, "cpu", warm).unexplained


def test_gains_are_estimates_while_other_programs_work() -> None:
    said = format_profile(profile().model_copy(update={"other_load": 0.31}))
    assert "Settings that help" in said
    assert "\n  Not measured: other programs took 31 % of the processor. Examine again when it is idle.\n" in said
    table = said.split("Settings that help")[1].split("\n\n")[0]
    assert not re.search(r"\d  +(measured|computed)", table)
    assert re.search(r"1\.31  estimate  data\.cache=memory", table)
    quiet = format_profile(profile().model_copy(update={"other_load": 0.04}))
    assert quiet == format_profile(profile()), "a little is always there"


def test_augmentation_is_named_only_where_the_recipe_has_some() -> None:
    for how, said in (
        (AUGMENT_NOTE, "normalising and augmenting the batch"),
        ("normalising a batch", "normalising the batch in"),
    ):
        one = StageCeiling(stage="normalise", side="loop", resource="device", seconds=1e-3, how=how)
        found = conclude_verdict(ThroughputModel.from_ceilings([one], None), "cpu", None, (), [one])
        assert said in found.sentence
