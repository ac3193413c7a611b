"""Executed notebooks as pages: whole offline, small, and without a trace of the machine."""

import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from dualtrack.reporting.notebook_html import capped, notebook_to_html, without_machine_paths

NETWORK = re.compile(
    r"""(?:src|href|action|srcset|data)\s*=\s*["']?\s*(?:https?:)?//|url\(|@import|<script|<link|<iframe""",
    re.IGNORECASE,
)


@pytest.fixture
def render(tmp_path):
    def render_cells(*cells):
        notebook = new_notebook(
            cells=list(cells), metadata={"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
        )
        for place, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{place}"
        path = tmp_path / "1_pinned_pool.ipynb"
        nbformat.write(notebook, path)
        notebook_to_html(path, tmp_path / "html" / "1_pinned_pool.html")
        return (tmp_path / "html" / "1_pinned_pool.html").read_text()

    return render_cells


def stream(text):
    return new_output("stream", name="stdout", text=text)


def test_two_hundred_thousand_printed_lines_stay_small_and_say_so(render):
    lines = [stream("".join(f"line {i}\n" for i in range(start, start + 1000))) for start in range(0, 200_000, 1000)]
    page = render(new_code_cell("for i in range(200_000): print(i)", outputs=lines, execution_count=1))
    assert len(page) < 30_000
    assert "line 0\n" in page
    assert "line 199999" in page
    assert "line 100000" not in page
    assert "199,601 lines left out" in page


def test_thousands_of_separate_outputs_are_capped_too(render):
    outputs = [new_output("display_data", data={"text/plain": f"item {i}"}) for i in range(5000)]
    page = render(new_code_cell("show()", outputs=outputs, execution_count=1))
    assert "item 99" in page
    assert "item 100<" not in page
    assert "4,900 further outputs" in page


def test_page_carries_no_network_reference_whatever_the_cells_bring(render):
    evil = '<img src="https://example.com/a.png"><script src="//example.com/x.js"></script><link rel=stylesheet href=http://example.com/x.css>'
    evil += '<p style="background:url(https://example.com/b.png)" onclick="go()">kept</p><iframe src="https://example.com"></iframe>'
    page = render(
        new_markdown_cell(f"# Title\n\n![alt](https://example.com/c.png) [text](https://example.com)\n\n{evil}"),
        new_code_cell(
            "show()", outputs=[new_output("display_data", data={"text/html": evil, "application/javascript": "x()"})]
        ),
    )
    assert NETWORK.findall(page) == []
    assert "onclick" not in page
    assert "kept" in page
    assert "text (https://example.com)" in page  # an address may be read, not followed


def test_inputs_are_folded_and_can_be_opened_without_script(render):
    page = BeautifulSoup(
        render(new_code_cell("# Parameters\nimport numpy\nvalue = 1", execution_count=3)), "html.parser"
    )
    details = page.find("details")
    assert details.has_attr("open") is False
    assert details.summary.get_text() == "Code [3]: import numpy"
    assert "value = 1" in details.get_text()


def test_machine_paths_are_taken_out_of_outputs_tracebacks_and_injected_parameters(render):
    error = new_output(
        "error",
        ename="E",
        evalue="e",
        traceback=["\x1b[31mFile /home/ada/work/src/pool.py:3\x1b[0m", "at /tmp/ipykernel_7/12.py"],
    )
    page = render(
        new_code_cell(
            'run_folder = "/home/ada/runs/1"\nratio = a /b/ c',
            outputs=[stream("see /root/secret/place/log.txt and /dev/shm\n"), error],
        ),
        new_code_cell(
            "x",
            outputs=[new_output("execute_result", data={"text/html": "<td>/Users/ada/x/y.py</td>"}, execution_count=1)],
        ),
    )
    assert not re.search(r"ada|/root|/tmp|/Users", page)
    assert "…/pool.py:3" in page
    assert "…/log.txt and /dev/shm" in page
    assert "/b/" in BeautifulSoup(page, "html.parser").find("details").get_text()  # a division is no path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a/b/c.py", "…/c.py"),
        ("file:///home/x/run/", "…/"),
        ("reports/run/index.html", "reports/run/index.html"),
        ("https://pytorch.org/docs/stable", "https://pytorch.org/docs/stable"),
        ("</td></tr>", "</td></tr>"),
        ("samples/s and 3/4", "samples/s and 3/4"),
        (r"C:\Users\ada\run\x.py", "…/x.py"),
        ("<environment>/lib/x/y.py and <td>/Users/a/b.py", "<environment>/lib/x/y.py and <td>…/b.py"),
        ("/proc/self/status", "/proc/self/status"),
    ],
)
def test_only_absolute_paths_are_shortened(text, expected):
    assert without_machine_paths(text) == expected


def test_a_progress_bar_shows_its_last_state_only(render):
    page = render(new_code_cell("run()", outputs=[stream("\r  0%|   | 0/9\r 50%|## | 5/9\r100%|###| 9/9\ndone\n")]))
    assert "100%|###| 9/9\ndone" in page
    assert "50%" not in page


def test_a_widget_falls_back_to_its_text(render):
    data = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "a", "version_major": 2, "version_minor": 0},
        "text/plain": "9 of 9",
    }
    page = render(new_code_cell("run()", outputs=[new_output("display_data", data=data)]))
    assert "9 of 9" in page
    assert "model_id" not in page


def test_a_figure_takes_its_alternative_text_along(render):
    data = {"image/png": "iVBORw0KGgo=", "text/plain": "Figure: does it hold?"}
    page = BeautifulSoup(
        render(new_code_cell("plot()", outputs=[new_output("display_data", data=data)])), "html.parser"
    )
    assert page.img["alt"] == "Figure: does it hold?"
    assert page.img["src"].startswith("data:image/png")


def test_a_very_long_line_is_cut_with_its_length():
    assert capped("x" * 5000) == "x" * 2000 + " … (5,000 characters)"


def test_the_same_notebook_gives_the_same_bytes(render):
    cells = [new_markdown_cell("# A"), new_code_cell("1 + 1", outputs=[stream("2\n")], execution_count=1)]
    assert render(*cells) == render(*cells)


def test_page_leads_back_to_the_report(render):
    assert 'href="../index.html"' in render(new_markdown_cell("# A"))
