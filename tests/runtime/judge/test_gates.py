"""Gates: what passes, what fails, what cannot be told, and what is refused before anything runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from timed import as_processes

from runtime.bundle.format import Benchmark, Gate, Judgement
from runtime.errors import UsageError
from runtime.judge.copies import Draws, describe_copies, find_draws
from runtime.judge.evidence import Evidence, column_evidence, count_least_samples, quality_evidence, select_metrics
from runtime.judge.gates import GateResult, check_gates, judge, overall
from runtime.judge.speed import process_evidence, range_evidence, size_evidence, timing_evidence
from runtime.metrics import NonFiniteOutputs
from runtime.tasks.metrics import METRICS

IMAGE = "image-classification"


def logits_with(right: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Logits of 10 classes that choose the label exactly where `right`."""
    chosen = np.where(right, labels, (labels + 1) % 10)
    return {"logits": np.eye(10, dtype=np.float32)[chosen]}


def top1_gate(n: int, gained: int, lost: int, gate: Gate, **more: Any) -> GateResult:
    """A gate on top1 where the baseline has 80 % of n right and the candidate gains and loses some."""
    labels = np.arange(n) % 10
    before = np.arange(n) < n * 8 // 10
    after = before.copy()
    after[:lost] = False
    after[n - gained :] = True
    judgement = Judgement(gates=(gate,), metrics=("top1",), **more)
    ours, theirs = logits_with(after, labels), logits_with(before, labels)
    metrics = select_metrics(IMAGE, theirs, labels, judgement)
    (result,) = judge(judgement, quality_evidence(metrics, ours, theirs, labels, judgement))
    return result


# verdicts


def test_a_model_compared_with_itself_passes_max_drop() -> None:
    result = top1_gate(1000, 0, 0, Gate("top1", max_drop=0.01))
    assert (result.verdict, result.holds, result.value) == ("pass", True, 0.0)
    assert (
        result.method == "Tango paired score"
        and result.why == "drop 0 (95% interval -0.003827 to 0.003827, 1000 samples)"
    )


def test_a_large_drop_fails() -> None:
    result = top1_gate(1000, 0, 100, Gate("top1", max_drop=0.01))
    assert (result.verdict, result.holds) == ("fail", False)
    assert result.value == pytest.approx(0.1)
    assert result.interval is not None
    assert result.interval[0] > 0.01


def test_a_gain_is_a_negative_drop() -> None:
    result = top1_gate(1000, 30, 5, Gate("top1", max_drop=0.0))
    assert result.value == pytest.approx(-0.025)
    assert result.verdict == "pass"


def test_too_few_samples_cannot_tell_and_say_how_many_could() -> None:
    result = top1_gate(100, 1, 1, Gate("top1", max_drop=0.01))
    assert (result.verdict, result.holds) == ("undecided", False)
    assert result.why.startswith("drop 0 (95% interval -0.04562 to 0.04562, 100 samples); about")
    assert "would be needed; counted as a failure" in result.why


@pytest.mark.parametrize("where", ["gate", "judgement"])
def test_undecided_passes_where_the_gate_or_the_judgement_says_so(where: str) -> None:
    if where == "gate":
        result = top1_gate(100, 1, 1, Gate("top1", max_drop=0.01, undecided="pass"))
    else:
        result = top1_gate(100, 1, 1, Gate("top1", max_drop=0.01), undecided="pass")
    assert (result.verdict, result.holds) == ("undecided", True)
    assert result.why.endswith("counted as a pass")
    assert overall((result,)) == "pass"


def test_the_gate_overrules_the_judgement() -> None:
    result = top1_gate(100, 1, 1, Gate("top1", max_drop=0.01, undecided="fail"), undecided="pass")
    assert not result.holds


def test_more_confidence_decides_less() -> None:
    assert top1_gate(1000, 0, 0, Gate("top1", max_drop=0.005), confidence=0.95).verdict == "pass"
    assert top1_gate(1000, 0, 0, Gate("top1", max_drop=0.005), confidence=0.99).verdict == "undecided"


def test_min_and_max_bound_the_candidates_value() -> None:
    assert top1_gate(1000, 0, 0, Gate("top1", min=0.7)).verdict == "pass"
    assert top1_gate(1000, 0, 0, Gate("top1", min=0.8)).verdict == "undecided"
    assert top1_gate(1000, 0, 0, Gate("top1", min=0.9)).verdict == "fail"
    assert top1_gate(1000, 0, 0, Gate("top1", max=0.9)).verdict == "pass"
    assert top1_gate(1000, 0, 0, Gate("top1", max=0.7)).verdict == "fail"


def test_a_gate_with_two_rules_gives_two_results() -> None:
    judgement = Judgement(gates=(Gate("size", min=10, max=90),))
    results = judge(judgement, size_evidence(200, 100))
    assert [(r.rule, r.verdict) for r in results] == [("min 10", "pass"), ("max 90", "fail")]


def test_overall_is_the_worst_that_does_not_hold() -> None:
    def result(verdict: Any, holds: bool) -> GateResult:
        return GateResult("top1", "min 1", 0.0, (0.0, 0.0), verdict, holds, "")

    passed, unsure, failed = result("pass", True), result("undecided", False), result("fail", False)
    assert overall(()) == "unjudged"
    assert overall((passed,)) == "pass"
    assert overall((passed, unsure)) == "undecided"
    assert overall((unsure, failed)) == "fail"


# quality against the baseline


@pytest.fixture
def pair() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    baseline = rng.normal(size=(300, 10)).astype(np.float32)
    noise = rng.normal(size=baseline.shape).astype(np.float32)
    return {"logits": baseline + 0.05 * noise}, {"logits": baseline}


def verdicts(ours: Any, theirs: Any, *gates: Gate) -> list[str]:
    judgement = Judgement(gates=gates)
    metrics = select_metrics(IMAGE, theirs, None, judgement)
    evidence = quality_evidence(metrics, ours, theirs, None, judgement)
    return [result.verdict for result in judge(judgement, evidence)]


def test_metrics_against_the_baseline_drop_from_their_ideal(pair: Any) -> None:
    gates = Gate("agreement", max_drop=0.2), Gate("kl", max_drop=0.01), Gate("kl", max_drop=1e-5), Gate("kl", max=0.01)
    assert verdicts(*pair, *gates) == ["pass", "pass", "fail", "pass"]
    assert verdicts(*pair, Gate("cosine", min=0.99), Gate("sqnr_db", min=20), Gate("sqnr_db", min=40)) == [
        "pass",
        "pass",
        "fail",
    ]


def test_identical_outputs_keep_the_tightest_bounds(pair: Any) -> None:
    gates = Gate("kl", max=0.0), Gate("cosine", min=0.999999), Gate("mse_baseline", max_drop=0.0)
    assert verdicts(pair[1], pair[1], *gates) == ["pass", "pass", "pass"]


def test_without_labels_every_metric_against_the_baseline_is_evidence(pair: Any) -> None:
    judgement = Judgement()
    metrics = select_metrics(IMAGE, pair[1], None, judgement)
    found = quality_evidence(metrics, pair[0], pair[1], None, judgement)
    assert set(found) == {"agreement", "kl", "cosine", "sqnr_db", "mse_baseline"}
    assert all(e.candidate.low <= e.candidate.value <= e.candidate.high for e in found.values())


def test_bootstrap_differences_are_paired() -> None:
    """The interval of the difference of two highly correlated scores is far narrower than that of either."""
    rng = np.random.default_rng(0)
    label = rng.normal(size=400)
    theirs = {"logits": (label + rng.normal(size=400)).astype(np.float32)[:, None]}
    ours = {"logits": theirs["logits"] + 0.01 * rng.normal(size=(400, 1)).astype(np.float32)}
    judgement = Judgement(metrics=("spearman",))
    metrics = select_metrics("text-classification", theirs, label, judgement)
    (found,) = quality_evidence(metrics, ours, theirs, label, judgement).values()
    assert found.difference is not None
    assert found.difference.high - found.difference.low < 0.1 * (found.candidate.high - found.candidate.low)


# speed and size


def test_speedup_of_a_model_twice_as_fast() -> None:
    rng = np.random.default_rng(0)
    pace = rng.gamma(50, 1 / 50, size=100)  # the machine's, the same for both
    seconds = np.stack([0.010 * pace, 0.005 * pace])
    evidence = {"latency_p50": timing_evidence("latency_p50", 50, as_processes(seconds), 0.95)}
    gates = Gate("latency_p50", min_speedup=1.9), Gate("latency_p50", min_speedup=2.1), Gate("latency_p50", max=6)
    results = judge(Judgement(gates=gates), evidence)
    assert [r.verdict for r in results] == ["pass", "fail", "pass"]
    assert results[0].value == pytest.approx(2.0)
    assert results[2].value == pytest.approx(1000 * np.median(seconds[1]))


def test_a_slower_model_has_dropped_in_latency_and_throughput() -> None:
    pace = np.random.default_rng(0).permutation(np.linspace(1.0, 1.1, 200))
    seconds = np.stack([0.010 * pace, 0.020 * pace])
    evidence = {
        "latency_p95": timing_evidence("latency_p95", 95, as_processes(seconds), 0.95),
        "throughput": timing_evidence("throughput", 50, as_processes(seconds), 0.95, lambda second: 8 / second),
    }
    gates = (
        Gate("latency_p95", max_drop=1.0),
        Gate("latency_p95", max_drop=20.0),
        Gate("throughput", max_drop=10.0),
        Gate("throughput", min_speedup=0.4),
        Gate("throughput", min=8 / 0.03),
    )
    assert [r.verdict for r in judge(Judgement(gates=gates), evidence)] == ["fail", "pass", "fail", "pass", "pass"]


def test_few_processes_cannot_tell() -> None:
    seconds = as_processes(np.full((2, 3), 0.01), n=3)
    evidence = {"latency_p50": timing_evidence("latency_p50", 50, seconds, 0.95)}
    (result,) = judge(Judgement(gates=(Gate("latency_p50", max=20),)), evidence)
    assert result.verdict == "undecided"
    assert "at least 6 would be needed" in result.why


def test_fresh_processes_are_judged_by_their_whole_range() -> None:
    evidence = {
        "load_time": range_evidence("load_time", (100.0, 102, 110, 111, 118, 120), (50.0, 51, 52, 52, 57, 60), 0.95),
        "peak_memory": range_evidence("peak_memory", (4e6,) * 6, (1e6,) * 5 + (2e6,), 0.95),
    }
    gates = (
        Gate("load_time", min_speedup=1.6),
        Gate("load_time", min_speedup=2.0),
        Gate("peak_memory", max=2e6),
        Gate("peak_memory", max=1.5e6),
    )
    results = judge(Judgement(gates=gates), evidence)
    assert [r.verdict for r in results] == ["pass", "undecided", "pass", "undecided"]
    assert evidence["peak_memory"].speedup is None
    few = {"load_time": range_evidence("load_time", (100.0, 110.0, 120.0), (50.0, 52.0, 60.0), 0.95)}
    (result,) = judge(Judgement(gates=(Gate("load_time", max=90),)), few)
    assert result.verdict == "undecided"
    assert "at least 6 would be needed" in result.why


def test_sizes_are_exact() -> None:
    gates = Gate("size", max=25), Gate("size_ratio", min=4), Gate("size", max_drop=0), Gate("size_ratio", min=4.1)
    results = judge(Judgement(gates=gates), size_evidence(100, 25))
    assert [r.verdict for r in results] == ["pass", "pass", "pass", "fail"]
    assert results[3].why == "4x"


def test_a_rate_within_a_limit_is_of_each_sides_own_batch() -> None:
    rates = np.array([[200.0, 800.0]] * 6)  # [processes, models]
    judgement = Judgement(
        gates=(Gate("throughput_under_latency", min_speedup=3.9), Gate("throughput_under_latency", min=900))
    )
    found = process_evidence("throughput_under_latency", rates, 0.95)
    assert found.speedup is not None and found.speedup.value == 4.0
    assert [r.verdict for r in judge(judgement, {found.name: found})] == ["pass", "fail"]


def test_a_candidate_that_is_always_late_has_no_rate() -> None:
    judgement = Judgement(gates=(Gate("throughput_under_latency", min=1),))
    found = process_evidence("throughput_under_latency", np.array([[200.0, 0.0]] * 6), 0.95)
    assert found.candidate.value == 0
    assert judge(judgement, {found.name: found})[0].verdict == "fail"


def test_a_metric_that_could_not_be_measured_fails_its_gate() -> None:
    judgement = Judgement(gates=(Gate("top1", min=0.0, undecided="pass"),), undecided="pass")
    (result,) = judge(judgement, {}, {"top1": "the outputs are broken"})
    assert (result.verdict, result.holds, result.value, result.why) == ("fail", False, None, "the outputs are broken")


# refusals


@pytest.mark.parametrize(
    ("judgement", "task", "has_labels", "message"),
    [
        (Judgement(gates=(Gate("top_1", min=0.5),)), IMAGE, True, "unknown metric 'top_1'; did you mean 'top1'"),
        (Judgement(metrics=("agreemnt",)), IMAGE, True, "did you mean 'agreement'"),
        (Judgement(gates=(Gate("top1", min=0.5),)), IMAGE, False, "'top1' needs labels.*without labels fit: agreement"),
        (Judgement(gates=(Gate("kl", max=1),)), "generic", True, "'kl' does not fit task generic; what fits: .*cosine"),
        (Judgement(gates=(Gate("top1", min_speedup=2),)), IMAGE, True, "min_speedup fits only latency_p50"),
        (Judgement(gates=(Gate("peak_memory", min_speedup=2),)), IMAGE, True, "min_speedup fits only latency_p50"),
        (Judgement(gates=(Gate("sqnr_db", max_drop=2),)), IMAGE, True, "max_drop has no baseline value"),
        (Judgement(gates=(Gate("size_ratio", max_drop=2),)), IMAGE, True, "max_drop has no baseline value"),
        *(
            (Judgement(gates=(gate,)), IMAGE, True, f"nothing can miss {said}")
            for gate, said in (
                (Gate("size_ratio", min=-1), "min -1: size_ratio lies between 0.001 and 1000 x"),
                (Gate("cosine", min=-1e308), r"min -1e\+308: cosine lies between -1 and 1"),
                (Gate("top1", max_drop=1), "max_drop 1: top1 lies between 0 and 1; 1 % is 0.01"),
                (Gate("mse_baseline", max_drop=1e308), r"max_drop 1e\+308"),
                (Gate("latency_p50", max=1e300), r"max 1e\+300: latency_p50 lies .* 8.64e\+07 ms"),
                (Gate("latency_p50", min_speedup=1e-300), "min_speedup 1e-300: it is above 0.001"),
                (Gate("top1", min_retained=1e-9), "min_retained 1e-09: it is above 0.001"),
            )
        ),
        (Judgement(gates=(Gate("throughput_under_latency", min=2),)), IMAGE, True, "needs benchmark.latency_limit_ms"),
    ],
)
def test_a_gate_that_cannot_be_judged_is_refused(
    judgement: Judgement, task: str, has_labels: bool, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_gates(judgement, task, has_labels)


def test_all_problems_are_told_at_once() -> None:
    judgement = Judgement(metrics=("nope",), gates=(Gate("top1", min_speedup=2), Gate("kl", max=1)))
    with pytest.raises(UsageError) as caught:
        check_gates(judgement, "generic", has_labels=False)
    assert len(caught.value.problems) == 4


def test_good_gates_are_accepted() -> None:
    gates = Gate("top1", max_drop=0.01), Gate("latency_p50", min_speedup=2), Gate("size_ratio", min=3)
    check_gates(Judgement(gates=gates, metrics=("kl",)), IMAGE, has_labels=True)
    limited = Judgement(gates=(Gate("throughput_under_latency", min=2),), benchmark=Benchmark(latency_limit_ms=10))
    check_gates(limited, IMAGE, has_labels=False)


def test_a_gate_that_does_not_fit_the_outputs_is_refused_before_the_candidate_runs() -> None:
    scores = {"logits": np.zeros((4, 1), np.float32)}
    with pytest.raises(UsageError, match=r"'top1' needs logits of at least two classes.*what fits here: .*spearman"):
        select_metrics("text-classification", scores, np.arange(4), Judgement(gates=(Gate("top1", min=0.5),)))


def test_labels_out_of_range_and_a_broken_baseline_are_refused_before_the_candidate_runs() -> None:
    outputs = {"logits": np.zeros((4, 3), np.float32)}
    with pytest.raises(UsageError, match="row 3 has label 3"):
        select_metrics(IMAGE, outputs, np.arange(4), Judgement())
    outputs["logits"][1, 1] = np.nan
    with pytest.raises(NonFiniteOutputs):
        select_metrics(IMAGE, outputs, None, Judgement())


def test_only_asked_metrics_and_those_of_gates_are_computed() -> None:
    outputs = {"logits": np.eye(10, dtype=np.float32)}
    judgement = Judgement(metrics=("kl",), gates=(Gate("cosine", min=0), Gate("size", max=1)))
    assert [m.name for m in select_metrics(IMAGE, outputs, None, judgement)] == ["kl", "cosine"]


def test_micro_averages_are_computed_on_request_only() -> None:
    outputs = {"logits": np.eye(10, dtype=np.float32)}

    def names(judgement: Judgement) -> list[str]:
        return [metric.name for metric in select_metrics(IMAGE, outputs, np.arange(10), judgement)]

    assert "f1_micro" not in names(Judgement())
    assert {"f1_micro", "f1_macro"} <= set(names(Judgement(gates=(Gate("f1_micro", min=0.5),))))
    assert names(Judgement(metrics=("f1_micro",))) == ["f1_micro"]


def test_every_metric_has_evidence_of_one_form() -> None:
    found = size_evidence(10, 5)
    assert all(isinstance(e, Evidence) and e.name == name for name, e in found.items())
    assert all(metric.name not in found for metric in METRICS.values())


# samples that do not count


def scored(n_tokens: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Sums of an encoder-decoder; those of samples without tokens are 0."""
    rng = np.random.default_rng(seed)
    sums = {"nll": n_tokens * rng.uniform(1, 2, len(n_tokens)), "n_tokens": n_tokens}
    return sums | {"agree": n_tokens - (n_tokens > 5), "answer": np.zeros((len(n_tokens), 1), np.int32)}


def test_samples_without_tokens_count_for_nothing() -> None:
    n_tokens = np.random.default_rng(0).integers(2, 9, 160) * (np.arange(160) % 2)
    metrics = [METRICS[name] for name in ("nll", "perplexity", "token_agreement")]
    gates = (Gate("nll", min_retained=0.9), Gate("nll", max=9, slice="day=even"))
    judgement = Judgement(gates=gates, slices=("day",))
    groups = {"day": {"even": np.arange(160) % 2 == 0, "odd": np.arange(160) % 2 == 1}}
    ours, theirs = scored(n_tokens, 1), scored(n_tokens, 2)
    found = quality_evidence(metrics, ours, theirs, None, judgement, groups)
    alone = [{name: values[1::2] for name, values in side.items()} for side in (ours, theirs)]
    wanted = quality_evidence(metrics, *alone, None, judgement)
    for name, evidence in found.items():
        assert replace(evidence, slices={}) == wanted[name] and evidence.n == 80
        none, every = evidence.slices["day"]
        assert (none.alone.n, every.alone.n) == (0, 80)
    retained, of_none = judge(judgement, found)
    assert "80 samples" in retained.why
    assert of_none.verdict == "undecided" and "none of them counts" in of_none.why


def windows(added: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(Candidate's, baseline's) sums of windows of parts of 64 tokens; `added`: nats per token of each part [N, P]."""
    rng = np.random.default_rng(0)
    tokens, base = np.full(added.shape, 64), rng.gamma(30, 0.1, added.shape)
    sides = []
    for nats in (base + added, base):
        parts = {"nll": nats * tokens, "n_tokens": tokens}
        sums = {name: values.sum(axis=1) for name, values in parts.items()}
        sides.append(sums | {f"part_{name}": values for name, values in parts.items()})
    return sides[0], sides[1]


def test_few_long_texts_are_decided_by_their_parts_and_what_neighbours_share() -> None:
    judgement = Judgement(gates=(Gate("nll", max_drop=0.05),))

    def find(added: np.ndarray, cut: bool = True) -> tuple[str, float]:
        """The verdict, and how far the end of the interval is."""
        sides = [{n: v for n, v in side.items() if cut or not n.startswith("part_")} for side in windows(added)]
        evidence = quality_evidence([METRICS["nll"]], *sides, None, judgement)
        (result,) = judge(judgement, evidence)
        difference = evidence["nll"].difference
        assert difference is not None
        return result.verdict, difference.high - difference.value

    rng = np.random.default_rng(1)
    alone, alike = rng.gamma(16, 0.00125, (19, 8)), np.repeat(rng.gamma(16, 0.00125, (19, 1)), 8, axis=1)
    assert find(alone)[0] == "pass" and find(alone + 0.1)[0] == "fail"
    assert find(alone, cut=False)[0] == "undecided"  # 19 texts
    assert find(alike)[1] > 1.5 * find(alone)[1]  # what differs from window to window has 19 draws and no more
    assert find(alone[:9])[0] == "undecided"  # of 9 runs no scatter is known
    assert find(rng.gamma(16, 0.00125, (2, 32)))[0] == "undecided"
    assert find(rng.gamma(16, 0.00125, (2, 88)))[0] == "pass"  # two texts of 11 runs each


def test_a_report_of_before_has_no_parts_and_is_compared_all_the_same() -> None:
    ours, theirs = windows(np.full((60, 8), 0.02))
    for side in (ours, theirs):
        side |= {"agree": side["n_tokens"] - 1, "part_agree": side["part_n_tokens"]}
    for name in ("nll", "token_agreement"):
        columns = [METRICS[name].columns(side, theirs) for side in (ours, theirs)]
        assert [len(each) for each in columns] == [4, 4]
        new = column_evidence(METRICS[name], columns[0], columns[1], Judgement())
        assert column_evidence(METRICS[name], columns[0], columns[1][:2], Judgement()).difference == new.difference


def test_what_few_texts_lack_is_told_in_texts() -> None:
    nine = quality_evidence([METRICS["nll"]], *windows(np.full((9, 8), 0.02)), None, Judgement())["nll"]
    assert nine.candidate.lacking == "at least 10 would be needed"


def test_metrics_of_tokens_where_there_are_none() -> None:
    outputs, task = scored(np.zeros(3, np.int64), 0), "automatic-speech-recognition"
    labels = ["a", "b", "c"]
    assert "wer" in {metric.name for metric in select_metrics(task, outputs, labels, Judgement())}
    with pytest.raises(
        UsageError, match="metric 'perplexity' is of samples that are read in one part, and there is none"
    ):
        select_metrics(task, outputs, labels, Judgement(gates=(Gate("perplexity", max=9),)))


def describe_copies_of(rows: np.ndarray) -> str | None:
    return describe_copies(find_draws({"x": rows, "label": np.zeros(len(rows), np.int64)}))


def test_copies_of_a_sample_tell_no_more_than_one_of_them() -> None:
    """The value stays; 400 copies of one sample decide nothing, and half of each twice has the interval of half."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    assert describe_copies_of(x) is None
    twice = np.repeat(x, 2, axis=0)
    assert describe_copies_of(twice) == (
        "60 of 120 evaluation samples are copies of others: values are of all 120, intervals of the 60 different ones."
    )
    metrics = [METRICS[name] for name in ("top1", "agreement", "kl", "cosine", "f1_macro")]
    logits, labels = rng.normal(size=(60, 2)), np.arange(60) % 2
    near = logits + 0.3 * rng.normal(size=logits.shape)
    once = quality_evidence(metrics, {"logits": near}, {"logits": logits}, labels, Judgement())
    sides = ({"logits": np.repeat(values, 2, axis=0)} for values in (near, logits))
    draws = find_draws({"x": twice, "label": np.repeat(labels, 2)})
    copied = quality_evidence(metrics, *sides, np.repeat(labels, 2), Judgement(), draws=draws)
    for name, known in once.items():
        assert copied[name].n == 60 and copied[name].counted == "different samples"
        for mine, theirs in ((copied[name].candidate, known.candidate), (copied[name].difference, known.difference)):
            assert mine is not None and theirs is not None
            assert mine.value == pytest.approx(theirs.value)
            # the bias of a macro average is of all rows, and half as large
            assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)
    ones = {"logits": np.repeat(near[:1], 400, axis=0)}
    alone = Draws(np.zeros(400, np.int64))
    baseline = {"logits": np.repeat(logits[:1], 400, axis=0)}
    known = quality_evidence(metrics, ones, baseline, np.zeros(400, np.int64), Judgement(), draws=alone)
    assert math.isinf(known["kl"].candidate.high)
    assert known["agreement"].candidate.high - known["agreement"].candidate.low > 0.9


def test_copies_that_are_wrong_together_widen_the_interval() -> None:
    """Of 400 samples 20 stand ten times: where these are wrong, no more is known than 20 can tell."""
    of_row = np.concatenate([np.arange(200), np.repeat(np.arange(200, 220), 10)])
    right = np.where(of_row < 200, True, of_row % 2 == 0)
    sides = {"logits": np.stack([~right, right], axis=1).astype(float)}
    wide, narrow = (
        quality_evidence([METRICS["top1"]], sides, sides, np.ones(400, np.int64), Judgement(), draws=draws)["top1"]
        for draws in (Draws(of_row), None)
    )
    assert wide.candidate.value == narrow.candidate.value == 0.75
    assert wide.candidate.high - wide.candidate.low > 3 * (narrow.candidate.high - narrow.candidate.low)


def test_so_many_windows_can_decide_a_gate_on_tokens() -> None:
    gate = Gate("nll", max_drop=0.05)
    found = [count_least_samples(gate, 0.95, longest) for longest in (20, 127, 511, 598, 1023, 2047)]
    assert found == [50, 26, 10, 8, 5, 3]


@pytest.mark.parametrize(
    ("gate", "least"),
    [
        (Gate("agreement", min=0.98), 183),
        (Gate("top1", max_drop=0.01), 381),
        (Gate("top1", min=0.9, max_drop=0.05), 73),
        (Gate("cosine", min=0.995), 50),
    ],
)
def test_so_many_samples_can_decide_a_gate_and_no_fewer(gate: Gate, least: int) -> None:
    assert count_least_samples(gate, 0.95) == least
    for n, verdict in ((least, "pass"), (least - 1, "undecided")):
        sides = {"logits": np.tile(np.eye(2)[:1], (n, 1)) + 1e-3 * np.random.default_rng(0).random((n, 2))}
        judgement = Judgement(gates=(gate,))
        evidence = quality_evidence([METRICS[gate.metric]], sides, sides, np.zeros(n, np.int64), judgement)
        verdicts = {result.verdict for result in judge(judgement, evidence)}
        assert ("undecided" in verdicts) == (verdict == "undecided")


def test_an_interval_keeps_within_what_the_metric_can_be() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    logits = np.eye(3)[np.where(rng.random(60) < 0.4, rng.integers(0, 3, 60), labels)]
    metrics = [METRICS["f1_macro"], METRICS["kl"]]
    known = quality_evidence(metrics, {"logits": logits}, {"logits": logits[::-1]}, labels, Judgement())
    for name, evidence in known.items():
        least, most = METRICS[name].range
        assert least <= evidence.candidate.low <= evidence.candidate.high <= most
