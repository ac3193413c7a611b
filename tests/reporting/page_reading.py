"""Read a page as a reviewer does, and judge a changed record as its stage would have."""

from bs4 import BeautifulSoup

from dualtrack.facts.verdicts import judge_stage


def soup_of(folder):
    return BeautifulSoup((folder / "index.html").read_bytes(), "html.parser")


def words(element):
    return " ".join(element.get_text(" ").split())


def judged_again(record, **changes):
    changed = record.model_copy(update=changes)
    verdict = judge_stage(changed.observations, changed.limits, changed.planted_faults, changed.device)
    changed = changed.model_copy(update={"verdict": verdict})
    return changed.model_copy(update={"stable_digest": changed.compute_stable_digest()})
