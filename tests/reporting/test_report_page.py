"""The page's content: what a reviewer reads follows from the records, and absence is never good news."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_records import example_records
from example_run import KINDS
from page_reading import judged_again, soup_of, words

from dualtrack.facts.derivations import table_rows
from dualtrack.facts.errors import EvidenceError
from dualtrack.facts.records import Outcome, StageRecord
from dualtrack.reporting.manifest import evidence_root, write_manifest
from dualtrack.reporting.quantities import range_beside, with_time_unit
from dualtrack.reporting.report_page import MAX_PAGE_BYTES, load_records, load_summary, with_code_spans, write_page
from dualtrack.reporting.verify import verify_run


def test_failed_gate_page_says_what_failed_by_how_much_and_what_to_do(run):
    folder = run("failed gate")
    write_page(folder)
    verdict = words(soup_of(folder).select_one(".verdict"))
    assert "Stage 2, Stream prefetcher: failed" in verdict
    assert "1 of 76 differ" in verdict
    assert "limit: equal to 0, n = 76" in verdict
    assert "3 epochs (limit: at least 100)" in verdict
    assert "epoch 3, step 7, leaf [0], index [2, 0, 4, 4]" in verdict
    assert f"dualtrack replay reports/{folder.name}/bundles/divergence-0" in verdict
    assert "Keep the previous path active" in verdict


def test_passed_page_says_so_and_how_to_promote(run):
    folder = run("passed")
    write_page(folder)
    page = soup_of(folder)
    assert "All 4 gates passed" in words(page.select_one(".verdict"))
    assert "complete, every gate line was measured" in words(page.select_one(".verdict"))
    assert f"dualtrack promote 1_pinned_pool --run {folder.name}" in words(page.select_one(".verdict"))
    assert [words(state) for state in page.select(".strip .state")] == ["passed"] * 5


def test_cpu_page_never_shows_a_gpu_figure_and_says_why(run):
    folder = run("cpu only")
    write_page(folder)
    page = soup_of(folder)
    for row in page.select(".results tbody tr"):
        for metric in ("MFU", "Pinned peak"):
            cell = row.select_one(f"td[data-label='{metric}']")
            assert words(cell) == "not measured: no CUDA device"
            assert cell.select_one(".missing")
    assert "numerics and reliability; no CUDA device" in words(page.select_one(".verdict"))
    assert "3 gate lines not measured without a CUDA device" in words(page.select_one(".risks"))


def test_result_cells_carry_value_interval_n_and_change_as_derived_from_the_trials(run):
    folder = run("passed")
    write_page(folder)
    records, _ = load_records(folder)
    row = next(row for row in table_rows(records.values()) if row.stage == "1_pinned_pool")
    cell = words(soup_of(folder).select(".results tbody tr")[1].select_one("td[data-label='Step latency']"))
    latency, change = row.step_latency, row.step_latency.change
    assert with_time_unit(latency.value) in cell
    assert range_beside(latency.low, latency.high, latency.value, "s") in cell
    assert f"\u00d7 {change.ratio:.3f} ({change.low:.3f}\u2013{change.high:.3f})" in cell
    assert "n = 6 pairs" in cell
    crash = words(soup_of(folder).select(".results tbody tr")[1].select_one("td[data-label='Crash rate']"))
    assert crash.startswith("0 of 7 at most 34.8 %")


def test_first_screen_shows_the_largest_rung_and_the_baseline_first(run):
    folder = run("passed")
    write_page(folder)
    rows = soup_of(folder).select(".results tbody tr")
    assert [words(row.th) for row in rows] == [
        "0 Freeze baseline baseline",
        "1 Pinned pool",
        "2 Stream prefetcher",
        "3 DDP expansion, 32 ranks",
    ]


def test_stages_that_did_not_run_say_so_and_nothing_after_a_crash_is_green(run):
    folder = run("crashed")
    write_page(folder)
    page = soup_of(folder)
    verdict = words(page.select_one(".verdict"))
    assert "Stage 2, Stream prefetcher: crashed" in verdict
    assert "crashed at cell 6: signal 9 (SIGKILL)" in verdict
    assert f"dualtrack run --resume {folder.name}" in verdict
    assert [words(state) for state in page.select(".strip .state")] == [
        "passed",
        "passed",
        "crashed",
        "not run",
        "passed",
    ]
    assert "partial" in words(page.select_one(".top"))
    assert "partial: stage 2 crashed at cell 6" in words(page.select_one(".trust"))
    assert words(page.select(".results tbody tr")[3].select_one("td[data-label='MFU']")) == "not run"
    assert page.select_one(".equivalence tbody tr:nth-of-type(3) .missing").get_text() == "crashed"


def test_a_run_without_run_json_is_partial(run):
    folder = run("cpu only")
    (folder / "run.json").unlink()
    write_page(folder)
    assert "partial: run.json is missing" in words(soup_of(folder).select_one(".trust"))
    assert "partial" in words(soup_of(folder).select_one(".top"))


def test_passed_in_run_json_without_a_record_is_no_pass(run):
    folder = run("cpu only")
    (folder / "records" / "2_stream_prefetcher.json").unlink()
    write_page(folder)
    page = soup_of(folder)
    assert words(page.select(".strip .state")[2]) == "record unreadable"
    assert "Stage 2, Stream prefetcher: record unreadable" in words(page.select_one(".verdict"))


def test_an_edited_record_is_shown_as_unreadable_and_the_rest_stays(run):
    folder = run("cpu only")
    path = folder / "records" / "1_pinned_pool.json"
    edited = json.loads(path.read_text())
    edited["observations"]["batches_equal_frozen"]["num_compared"] = 24
    path.write_text(json.dumps(edited))
    write_page(folder)
    page = soup_of(folder)
    assert [words(state) for state in page.select(".strip .state")] == [
        "passed",
        "record unreadable",
        "passed",
        "passed",
        "passed",
    ]
    assert "stable_digest does not follow" in words(page.select_one(".verdict"))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(EvidenceError, match="found neither"):
        write_page(tmp_path)


def test_equivalence_counts_are_the_records_sums_with_the_first_divergence(run):
    folder = run("failed gate")
    write_page(folder)
    rows = soup_of(folder).select(".equivalence tbody tr")
    assert [words(cell) for cell in rows[2].find_all("td")] == ["198", "197", "0", "1"]
    assert "legacy 0.43750000 (3ee00000), candidate 0.43750003 (3ee00001)" in words(rows[3])
    assert "0 of 92 differ" in words(soup_of(folder).select_one(".equivalence .note"))


def test_trust_box_names_root_code_inputs_machine_and_how_to_check(run):
    folder = run("passed")
    write_page(folder)
    trust = words(soup_of(folder).select_one(".trust"))
    assert evidence_root(folder) in trust
    assert f"dualtrack verify reports/{folder.name}" in trust
    assert "commit 4f1c09d2a7b3, clean" in trust
    assert "torch 2.11.0+cu128" in trust
    assert "NVIDIA H200" in trust
    assert example_records("cuda")["1_pinned_pool"].frozen_inputs_digest[:16] in trust


def test_planted_faults_and_rollbacks_of_each_gate_are_on_the_first_screen(run):
    folder = run("cpu only")
    write_page(folder)
    tried = words(soup_of(folder).select_one(".tried"))
    for stage in "0123":
        assert f"{stage} planted fault caught" in tried
    assert "1 rollback pooled → legacy verified: 23 of 23 steps equal" in tried


def test_a_fault_that_slipped_through_comes_first_and_in_capitals(run):
    folder = run("cpu only")
    path = folder / "records" / "1_pinned_pool.json"
    record = StageRecord.load(path)
    slipped = record.planted_faults[0].model_copy(update={"caught": False, "what": "a slot handed out twice"})
    path.unlink()
    judged_again(record, planted_faults=(*record.planted_faults, slipped)).save(path)
    write_page(folder)
    page = soup_of(folder)
    assert "1 planted fault NOT caught (1 of 2): a slot handed out twice" in words(page.select_one(".tried"))
    assert words(page.select(".strip .state")[1]) == "tool error"


def test_conditions_name_what_differs_between_stages(run):
    folder = run("cpu only")
    path = folder / "records" / "2_stream_prefetcher.json"
    record = StageRecord.load(path)
    warmer = json.loads(json.dumps(record.conditions))
    warmer["before"]["load"]["load_average_1"] = 7.5
    path.unlink()
    record.model_copy(update={"conditions": warmer}).save(path)
    write_page(folder)
    section = soup_of(folder).select_one("#conditions")
    assert "1 of 19 facts differ" in words(section)
    assert (
        words(section.select_one("tbody tr"))
        == "load load_average_1 stage 0: 0.4; stage 1: 0.4; stage 2: 7.5; stage 3: 0.4; stage 4: 0.4"
    )
    assert "gpu name not collected" in words(section.select("table")[1])


def test_a_failed_trial_shows_its_cause_in_the_table_of_trials(run):
    folder = run("cpu only")
    path = folder / "records" / "1_pinned_pool.json"
    record = StageRecord.load(path)
    died = record.trials[4].model_copy(
        update={
            "outcome": Outcome(state="failed", cause="killed by signal SIGKILL", seconds=1.0),
            "step_seconds": (),
            "samples_per_second": None,
        }
    )
    path.unlink()
    judged_again(record, trials=(*record.trials[:4], died, *record.trials[5:])).save(path)
    write_page(folder)
    rows = [words(row) for row in soup_of(folder).select("#stage-1 details tbody tr")]
    assert "killed by signal SIGKILL" in rows[4]
    assert "not measured" in rows[4]


def test_gate_lines_below_are_all_there_worst_first(run):
    folder = run("failed gate")
    write_page(folder)
    record = load_records(folder)[0]["2_stream_prefetcher"]
    rows = soup_of(folder).select("#stage-2 .gate tbody tr")
    assert len(rows) == len(record.verdict.lines)
    states = [words(row.td) for row in rows]
    assert states == sorted(states, key=["failed", "not measured", "passed"].index)
    assert {words(row.select_one("td[data-label='Statistic']")) for row in rows} == {
        " ".join(line.statistic.split()) for line in record.verdict.lines
    }


@pytest.mark.parametrize("kind", KINDS)
def test_same_run_gives_the_same_bytes_and_the_page_verifies(kind, run):
    folder = run(kind)
    first = write_page(folder).read_bytes()
    write_manifest(folder)
    assert write_page(folder).read_bytes() == first
    assert verify_run(folder).differences == ()


def test_a_figure_is_drawn_again_only_when_its_data_changed(run):
    folder = run("cpu only")
    write_page(folder)
    picture = folder / "figures" / "1_pinned_pool-throughput.svg"
    picture.write_text(picture.read_text().replace("<g id", "<g  id", 1))
    kept = picture.read_bytes()
    write_page(folder)
    assert picture.read_bytes() == kept
    data = picture.with_suffix(".csv")
    data.write_text(data.read_text().replace("legacy", "legacz"))
    write_page(folder)
    assert picture.read_bytes() != kept


@pytest.mark.parametrize("kind", KINDS)
def test_page_holds_no_network_reference_no_machine_path_and_is_small(kind, run, tmp_path):
    folder = run(kind)
    page = write_page(folder).read_text()
    assert len(page.encode()) < MAX_PAGE_BYTES / 2
    assert re.findall(r"""(?:src|srcset|action)\s*=|@import|url\(\s*["']?(?!#)""", page) == []
    assert re.findall(r"""(?:https?:)?//[\w.-]+\.\w+""", page) == []
    assert str(tmp_path) not in page
    assert not re.search(r"/(?:home|root|tmp|Users|work)/", page)


def test_content_is_escaped(run):
    folder = run("cpu only")
    record = StageRecord.load(folder / "records" / "1_pinned_pool.json")
    (folder / "records" / "1_pinned_pool.json").unlink()
    record.model_copy(update={"notes": ("<script>alert(1)</script>",)}).save(folder / "records" / "1_pinned_pool.json")
    page = write_page(folder).read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<script>") == 1
    assert with_code_spans("`a<b` & c") == "<code>a&lt;b</code> &amp; c"


def test_a_page_above_two_megabytes_is_refused(run, monkeypatch):
    folder = run("cpu only")
    monkeypatch.setattr("dualtrack.reporting.report_page.MAX_PAGE_BYTES", 10_000)
    with pytest.raises(EvidenceError, match="at most 10,000 bytes"):
        write_page(folder)


def test_a_figure_with_a_million_points_keeps_the_page_small(run):
    folder = run("cpu only")
    path = folder / "records" / "1_pinned_pool.json"
    record = StageRecord.load(path)
    samples = record.trials[1].memory
    many = samples.model_copy(
        update={
            "seconds": tuple(float(i) for i in range(100_000)),
            "pss_bytes": samples.pss_bytes[:1] * 100_000,
            "pool_bytes": None,
        }
    )
    path.unlink()
    judged_again(
        record, trials=(record.trials[0], record.trials[1].model_copy(update={"memory": many}), *record.trials[2:])
    ).save(path)
    assert write_page(folder).stat().st_size < MAX_PAGE_BYTES / 2


def test_raw_files_are_listed_in_a_fixed_order_with_the_seal_last(run, monkeypatch):
    folder = run("cpu only")
    found = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: sorted(found(self, pattern), reverse=True))
    write_page(folder)
    listed = [(words(row.td), row.a["href"]) for row in soup_of(folder).select(".files tbody tr")]
    records = [address for kind, address in listed if kind == "record"]
    assert len(records) == 10  # five records and their completion marks
    assert records == sorted(records)
    assert [address for _, address in listed[-2:]] == ["manifest.json", "ledger.jsonl"]


def test_page_is_built_without_torch(run):
    folder = run("cpu only")
    code = f"import sys, pathlib; from dualtrack.reporting.report_page import write_page; write_page(pathlib.Path({str(folder)!r})); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_summary_that_is_no_summary_is_refused_by_name(run):
    folder = run("cpu only")
    (folder / "run.json").write_text("{}")
    with pytest.raises(EvidenceError, match=r"run\.json is not a summary"):
        load_summary(folder)
