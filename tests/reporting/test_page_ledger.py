"""What the page makes of a run's ledger: promotions, rollbacks and waivers, and a ledger that is damaged."""

from datetime import timedelta

from example_trials import START
from page_reading import judged_again, soup_of, words

from dualtrack.facts.ledger import Ledger, Promotion, RollbackEntry, Waiver
from dualtrack.facts.observations import Limit
from dualtrack.facts.records import StageRecord
from dualtrack.reporting.report_page import write_page


def test_waiver_lets_a_stage_stand_in_red_until_it_ends(run):
    folder = run("cpu only")
    record = StageRecord.load(folder / "records" / "1_pinned_pool.json")
    (folder / "records" / "1_pinned_pool.json").unlink()
    limits = (*record.limits, Limit(observation="waited_for", relation="equal", bound=True, reason="r"))
    judged_again(record, limits=limits).save(folder / "records" / "1_pinned_pool.json")
    waiver = {
        "at": START,
        "stage": "1_pinned_pool",
        "observation": "waited_for",
        "who": "Ada",
        "why": "hardware on order",
    }
    Ledger(folder / "ledger.jsonl").append(Waiver(**waiver, until=START + timedelta(days=30)))
    write_page(folder)
    page = soup_of(folder)
    assert words(page.select(".strip .state")[1]) == "waived"
    assert "3 of 4 gates passed, 1 waived" in words(page.select_one(".verdict"))
    assert "stage 1, waited_for: waived by Ada until 2026-04-13: hardware on order" in words(
        page.select_one(".risks li.waiver")
    )
    (folder / "ledger.jsonl").unlink()
    Ledger(folder / "ledger.jsonl").append(Waiver(**waiver, until=START + timedelta(seconds=1)))
    write_page(folder)
    assert words(soup_of(folder).select(".strip .state")[1]) == "not measured"
    assert "EXPIRED waiver" in words(soup_of(folder).select_one(".risks li.waiver"))


def test_promotions_and_rollbacks_come_from_the_run_s_ledger(run):
    folder = run("cpu only")
    ledger = Ledger(folder / "ledger.jsonl")
    for stage, path in (
        ("0_freeze_baseline", "legacy"),
        ("1_pinned_pool", "pooled"),
        ("2_stream_prefetcher", "prefetched"),
    ):
        ledger.append(Promotion(at=START, stage=stage, active_path=path, who="Ada", why="passed gate", run=folder.name))
    write_page(folder)
    assert "Promoted through stage 2, active path: prefetched" in words(soup_of(folder).select_one(".verdict"))
    assert "promote 3_ddp_expansion" in words(soup_of(folder).select_one(".verdict"))
    ledger.append(
        RollbackEntry(
            at=START, stage="2_stream_prefetcher", from_path="prefetched", to_path="pooled", who="Ada", why="drill"
        )
    )
    write_page(folder)
    assert "Promoted through stage 1, active path: pooled" in words(soup_of(folder).select_one(".verdict"))
    assert "rolled back" in words(soup_of(folder).select(".strip li")[2])


def test_a_rehearsal_promotes_nothing_and_takes_nothing_back(run):
    folder = run("cpu only")
    ledger = Ledger(folder / "ledger.jsonl")
    by = {"at": START, "stage": "1_pinned_pool", "who": "rehearsal"}
    ledger.append(Promotion(**by, active_path="pooled", why="to be rolled back at once", run=folder.name))
    ledger.append(
        RollbackEntry(**by, from_path="pooled", to_path="legacy", why="every run rehearses its rollback", verified=True)
    )
    write_page(folder)
    assert not soup_of(folder).select(".strip .tag")
    assert "Nothing is promoted by this run" in words(soup_of(folder).select_one(".verdict"))


def test_a_damaged_ledger_grants_nothing(run):
    folder = run("cpu only")
    (folder / "ledger.jsonl").write_text('{"kind": "promotion"}\n{"kind": "promotion"}\n')
    write_page(folder)
    assert "the ledger is damaged and grants nothing" in words(soup_of(folder).select_one(".risks"))
    assert "Nothing is promoted by this run" in words(soup_of(folder).select_one(".verdict"))
