"""Verification: a sound run verifies offline and without torch, and whatever is changed in it is named."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sealed_run import make_record, make_trials, seal_again, write_record, write_sealed_run, write_summary

from dualtrack.facts.derivations import ratio_from_trials
from dualtrack.facts.digests import sha256_file, sha256_json
from dualtrack.facts.ledger import CleanEpochs, Ledger, RunDigest
from dualtrack.facts.observations import Equality, Failures, Maximum, Ratio, State, Value
from dualtrack.facts.records import StageRecord
from dualtrack.facts.verdicts import judge_stage
from dualtrack.reporting.manifest import write_manifest
from dualtrack.reporting.record_checks import check_record
from dualtrack.reporting.verify import verify_run

POOL = "1_pinned_pool"
Records = dict[str, StageRecord]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_a_sound_run_verifies(run: Path) -> None:
    write_sealed_run(run)
    result = verify_run(run)
    assert result.differences == ()
    assert (result.ok, result.is_complete, result.num_verdicts) == (True, True, 5)
    assert "verified: nothing differs" in result.text()
    assert str(result.manifest_digest) in result.text()


def test_a_copy_of_a_run_verifies_anywhere(run: Path, tmp_path: Path) -> None:
    write_sealed_run(run)
    shutil.copytree(run, tmp_path / "mail" / "attachment")
    assert verify_run(tmp_path / "mail" / "attachment").ok


def test_a_partial_run_can_be_sound_and_is_called_partial(run: Path) -> None:
    write_sealed_run(run, ("0_freeze_baseline", POOL))
    result = verify_run(run)
    assert result.ok
    assert "partial run" in result.text()


def test_verification_needs_neither_torch_nor_network(run: Path) -> None:
    write_sealed_run(run)
    script = (
        "import sys, socket\n"
        "class Refused:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ImportError('torch was imported')\n"
        "sys.meta_path.insert(0, Refused())\n"
        "def refuse(*arguments, **more): raise OSError('network used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from pathlib import Path\n"
        "from dualtrack.reporting.verify import verify_run\n"
        "result = verify_run(Path(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules\n"
        "print(result.text()); sys.exit(0 if result.ok else 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def flip_byte(path: Path, place: int, change: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= change
    path.write_bytes(content)


@pytest.mark.parametrize("num_changes", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_a_change_of_any_one_byte_is_detected_and_its_file_named(run: Path, num_changes: int) -> None:
    write_sealed_run(run)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    chance = random.Random(20260101)
    for number in range(num_changes):
        path = files[number % len(files)] if number < len(files) else chance.choice(files)
        place, change = chance.randrange(path.stat().st_size), chance.randrange(1, 256)
        flip_byte(path, place, change)
        result = verify_run(run)
        assert not result.ok, f"{path.name} at {place}: xor {change} went unnoticed"
        assert path.name in str(result.first_difference), f"{path.name}: {result.first_difference}"
        flip_byte(path, place, change)
    assert verify_run(run).ok


@pytest.mark.parametrize(
    "name",
    [
        "notebooks/2_stream_prefetcher.ipynb",
        "figures/1_pinned_pool-memory.csv",
        "records/1_pinned_pool.json",
        "html/1_pinned_pool.html",
    ],
)
def test_a_missing_file_is_named(run: Path, name: str) -> None:
    write_sealed_run(run)
    (run / name).unlink()
    assert verify_run(run).first_difference == f"{name}: missing, though the manifest lists it"


@pytest.mark.parametrize("name", ["notes.txt", "records/1_pinned_pool.json.bak", "figures/extra.svg"])
def test_a_file_put_in_afterwards_is_named(run: Path, name: str) -> None:
    write_sealed_run(run)
    (run / name).write_text("x")
    assert verify_run(run).first_difference == f"{name}: not listed in the manifest; it was put in afterwards"


@pytest.mark.parametrize("name", ["manifest.json", "ledger.jsonl", "run.json", "index.html"])
def test_a_run_without_its_seal_its_summary_or_its_page_does_not_verify(run: Path, name: str) -> None:
    write_sealed_run(run)
    (run / name).unlink()
    assert name in str(verify_run(run).first_difference)


def test_a_folder_that_is_no_run_does_not_verify_and_raises_nothing(tmp_path: Path) -> None:
    assert not verify_run(tmp_path).ok
    assert not verify_run(tmp_path / "absent").ok


def test_a_ledger_that_goes_on_after_the_seal_is_sound_and_one_sealed_otherwise_is_not(run: Path) -> None:
    write_sealed_run(run)
    Ledger(run / "ledger.jsonl").append(CleanEpochs(at=make_record(POOL).started_at, key="k", num_epochs=1))
    assert verify_run(run).ok
    (run / "figures" / "1_pinned_pool-memory.csv").write_text("step,bytes\n0,1\n")
    ledger = (run / "ledger.jsonl").read_bytes()
    write_manifest(run)
    (run / "ledger.jsonl").write_bytes(ledger)
    assert "is not the one that ledger.jsonl seals" in str(verify_run(run).first_difference)


@pytest.mark.parametrize("num_cut", [1, 20])
def test_a_ledger_that_was_cut_short_is_named(run: Path, num_cut: int) -> None:
    write_sealed_run(run)
    path = run / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-num_cut])
    assert "ledger.jsonl: line 3 has no end" in str(verify_run(run).first_difference)


def test_a_manifest_that_says_more_or_other_than_the_folder_is_named_though_it_is_sealed(run: Path) -> None:
    write_sealed_run(run)
    path = run / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 1, "note": "audited"'))
    root = json.loads(path.read_bytes())["evidence_root"]
    seal = RunDigest(at=make_record(POOL).started_at, run="run", manifest_digest=sha256_file(path), evidence_root=root)
    Ledger(run / "ledger.jsonl").append(seal)
    assert "manifest.json: changed; computed from the folder" in str(verify_run(run).first_difference)


def edited(records: Records, stage: str = POOL, **changes: Any) -> Records:
    """Return the records with one changed, its verdict and stable digest computed anew."""
    record = records[stage].model_copy(update=changes)
    if "verdict" not in changes:
        verdict = judge_stage(record.observations, record.limits, record.planted_faults, record.device)
        record = record.model_copy(update={"verdict": verdict})
    return {**records, stage: record.model_copy(update={"stable_digest": record.compute_stable_digest()})}


def with_observation(records: Records, key: str, **changes: Any) -> Records:
    seen = records[POOL].observations[key].model_copy(update=changes)
    return edited(records, observations={**records[POOL].observations, key: seen})


def edit_verdict(records: Records) -> Records:
    mismatched = Equality(what="batches", num_compared=40, num_equal=39, num_mismatched=1)
    record = records[POOL]
    return edited(
        records, observations={**record.observations, "batches_equal_frozen": mismatched}, verdict=record.verdict
    )


def edit_ratio(records: Records) -> Records:
    seen = records[POOL].observations["step_latency_ratio"]
    assert isinstance(seen, Ratio)
    pairs = tuple(pair.model_copy(update={"candidate": pair.candidate / 2}) for pair in seen.pairs)
    return with_observation(records, "step_latency_ratio", pairs=pairs)


def drop_pair(records: Records) -> Records:
    seen = records[POOL].observations["step_latency_ratio"]
    assert isinstance(seen, Ratio)
    return with_observation(records, "step_latency_ratio", pairs=seen.pairs[1:], num_planned_pairs=5)


def drop_trials_of_a_pair(records: Records) -> Records:
    return edited(
        records, trials=tuple(trial for trial in records[POOL].trials if trial.pair != 5 or trial.track == "legacy")
    )


def hide_crash(records: Records) -> Records:
    trials = list(records[POOL].trials)
    outcome = trials[3].outcome.model_copy(update={"state": "failed", "cause": "killed by signal SIGKILL"})
    trials[3] = trials[3].model_copy(update={"outcome": outcome})
    return edited(records, trials=tuple(trials))


def edit_peak(records: Records) -> Records:
    assert isinstance(records[POOL].observations["pool_peak_bytes"], Maximum)
    return with_observation(records, "pool_peak_bytes", values=(1.0,) * 6)


def edit_rollback(records: Records) -> Records:
    rollback = records[POOL].rollback
    assert rollback is not None
    return edited(records, rollback=rollback.model_copy(update={"num_steps_equal": 4}))


def drop_rollback(records: Records) -> Records:
    return edited(records, rollback=None)


def mark_fault_caught(records: Records) -> Records:
    fault = records[POOL].planted_faults[0]
    harmless = fault.model_copy(update={"seen": Equality(what="x", num_compared=1, num_equal=1)})
    return edited(records, planted_faults=(harmless,))


def drop_planted_fault(records: Records) -> Records:
    return edited(records, planted_faults=(), verdict=records[POOL].verdict)


def widen_limit(records: Records) -> Records:
    limits = tuple(
        limit.model_copy(update={"bound": 9999}) if limit.observation == "pool_peak_bytes" else limit
        for limit in records[POOL].limits
    )
    return edited(records, limits=limits)


def change_setting(records: Records) -> Records:
    return edited(records, settings={**records[POOL].settings, "seed": 2})


def change_pairs_with_digest(records: Records) -> Records:
    settings = {**records[POOL].settings, "num_pairs": 8}
    return edited(records, settings=settings, settings_digest=sha256_json(settings))


def mix_frozen_inputs(records: Records) -> Records:
    return edited(records, frozen_inputs_digest="e" * 64)


def mix_hardware(records: Records) -> Records:
    return edited(records, hardware_identity="cuda-other")


@pytest.mark.parametrize(
    ("forge", "named"),
    [
        (
            edit_verdict,
            "verdict on batches_equal_frozen: recorded passed [0 of 40 differ], judged again failed [1 of 40 differ]",
        ),
        (edit_ratio, "step_latency_ratio: the observation does not follow"),
        (drop_pair, "step_latency_ratio: expected 6 planned pairs"),
        (drop_trials_of_a_pair, "a trial was taken out"),
        (hide_crash, "trial_failures: the observation does not follow"),
        (edit_peak, "pool_peak_bytes: the observation does not follow"),
        (edit_rollback, "rollback_verified: expected False, got True"),
        (drop_rollback, "no rollback is recorded"),
        (mark_fault_caught, "planted fault 'one byte changed': recorded as caught, judged again it is not caught"),
        (drop_planted_fault, "verdict on planted fault: batches_equal_frozen: recorded passed"),
        (widen_limit, "its limits are not those of frozen/limits.json"),
        (change_setting, "settings_digest does not follow"),
        (change_pairs_with_digest, "expected 8 planned pairs"),
        (mix_frozen_inputs, "frozen_inputs_digest is eeee"),
        (mix_hardware, "hardware_identity is cuda-other"),
    ],
)
def test_an_edit_with_every_digest_computed_anew_is_detected(
    run: Path, forge: Callable[[Records], Records], named: str
) -> None:
    records = write_sealed_run(run)
    forged = forge(records)
    assert forged != records
    seal_again(run, forged)
    result = verify_run(run)
    assert named in str(result.first_difference), result.differences


def test_an_honest_record_sealed_again_verifies(run: Path) -> None:
    records = write_sealed_run(run)
    seal_again(run, records)
    assert verify_run(run).ok


def reworded(records: Records, sources: dict[str, str], **changes: Any) -> Records:
    """Return the records with the first line of one verdict changed, made by these source files."""
    first, *others = records[POOL].verdict.lines
    verdict = records[POOL].verdict.model_copy(update={"lines": (first.model_copy(update=changes), *others)})
    return edited(records, verdict=verdict, conditions={"before": {"sources": sources}})


def test_a_record_of_another_version_verifies_by_its_figures_and_says_so(run: Path) -> None:
    older = {"dualtrack/facts/line_judges.py": "0" * 64}
    records = write_sealed_run(run)
    seal_again(run, reworded(records, older, statistic="no difference in 40"))
    result = verify_run(run)
    assert result.ok, result.differences
    assert f"{POOL} was judged by another version" in result.text()
    for change in ({"num": 41}, {"value": 1.0}, {"limit": "equal to 3"}, {"state": State.FAILED}):
        seal_again(run, reworded(records, older, **change))
        assert "verdict on batches_equal_frozen" in str(verify_run(run).first_difference), change


def test_a_record_of_this_version_has_this_versions_wording(run: Path) -> None:
    path = Path(sys.modules["dualtrack.facts.line_judges"].__file__ or "")
    records = write_sealed_run(run)
    for sources in ({}, {"dualtrack/facts/line_judges.py": sha256_file(path)}):
        seal_again(run, reworded(records, sources, statistic="no difference in 40"))
        assert "recorded passed [no difference in 40]" in str(verify_run(run).first_difference)


def test_clean_epochs_that_the_ledger_does_not_count_are_named(run: Path) -> None:
    records = write_sealed_run(run)
    stage = "2_stream_prefetcher"
    claim = {**records[stage].observations, "clean_epochs": Value(what="clean epochs", value=100)}
    forged = edited(records, stage, observations=claim)
    seal_again(run, forged)
    assert "claims 100 clean epochs, ledger.jsonl counts none" in str(verify_run(run).first_difference)
    Ledger(run / "ledger.jsonl").append(CleanEpochs(at=records[stage].started_at, key="k", num_epochs=100))
    write_manifest(run)
    assert verify_run(run).ok


def test_a_ratio_over_one_world_size_of_several_follows_from_the_trials() -> None:
    record = make_record("3_ddp_expansion")
    four, eight = (
        [
            trial.model_copy(update={"track": "single" if trial.track == "legacy" else "ddp"})
            for trial in make_trials("ddp")
        ]
        for _ in range(2)
    )
    trials = [trial.model_copy(update={"world_size": 4}) if trial.track == "ddp" else trial for trial in four]
    trials += [trial.model_copy(update={"position": trial.position + 12, "world_size": 8}) for trial in eight]
    ratio = ratio_from_trials(trials, "ddp", "step", world_size=8)
    assert isinstance(ratio, Ratio)
    assert len(ratio.pairs) == 6
    observed = record.model_copy(
        update={"trials": tuple(trials), "observations": {**record.observations, "step_latency_ratio": ratio}}
    )
    assert list(check_record(observed)) == []
    other = ratio.model_copy(update={"pairs": ratio.pairs[::-1]})
    forged = observed.model_copy(update={"observations": {**record.observations, "step_latency_ratio": other}})
    assert "does not follow from the 24 raw trials" in next(check_record(forged))


def test_a_gate_that_failed_verifies_as_failed(run: Path) -> None:
    records = write_sealed_run(run)
    assert isinstance(records[POOL].observations["trial_failures"], Failures)
    failed = edited(
        records,
        observations={**records[POOL].observations, "pool_peak_bytes": records[POOL].observations["pool_peak_bytes"]},
    )
    bad = Equality(what="batches", num_compared=40, num_equal=39, num_mismatched=1)
    failed = edited(records, observations={**records[POOL].observations, "batches_equal_frozen": bad})
    assert failed[POOL].verdict.state is State.FAILED
    seal_again(run, failed)
    assert verify_run(run).differences == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"stable_digest": "0" * 64}, "stable_digest does not follow"),
        ({"exit_code": 1}, "exit code 1 does not go with its stages"),
        ({"parameters": {POOL: {"num_pairs": 60}}}, "parameter num_pairs of 1_pinned_pool is 60"),
    ],
)
def test_a_summary_that_contradicts_the_records_is_named(run: Path, changes: dict[str, Any], named: str) -> None:
    records = write_sealed_run(run)
    write_summary(run, records, **changes)
    write_manifest(run)
    assert named in str(verify_run(run).first_difference)


def test_a_stage_that_run_json_calls_passed_needs_a_record_and_its_mark(run: Path) -> None:
    records = write_sealed_run(run)
    (run / "records" / f"{POOL}.completed.json").unlink()
    write_manifest(run)
    assert f"{POOL}.completed.json: missing" in str(verify_run(run).first_difference)
    (run / "records" / f"{POOL}.json").unlink()
    write_manifest(run)
    assert "there is no record of it" in str(verify_run(run).first_difference)
    write_record(run, records[POOL])


def test_a_verdict_of_another_stage_under_a_stages_name_is_named(run: Path) -> None:
    write_sealed_run(run)
    shutil.copy(run / "records" / f"{POOL}.json", run / "records" / "2_stream_prefetcher.json")
    write_manifest(run)
    assert "holds the record of 1_pinned_pool" in str(verify_run(run).first_difference)


def test_a_rollback_that_was_never_executed_cannot_be_observed_as_verified(run: Path) -> None:
    records = write_sealed_run(run)
    claim = Value(what="rollback", value=True)
    stage = "3_ddp_expansion"
    forged = edited(records, stage, observations={**records[stage].observations, "rollback_verified": claim})
    seal_again(run, forged)
    assert "no rollback is recorded" in str(verify_run(run).first_difference)
