"""The report says what the rows say, stands alone, and shouts where it must."""
import html.parser
import re

import pytest
from fake_run import METHODS, TASKS, make_folder, make_rows

from tvjax import report, report_words, results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("run"))
    report.write(folder, command="python -m tvjax.run --config=x.py")
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "report.html").read_text()


def test_all_files_are_there(folder):
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    pictures = {f"figures/{name}.png" for name in ("per_task_4", "over_tasks", "over_scales_4", "cosines")}
    assert {"tables.md", "tables.tex", "report.html"} | pictures <= names
    assert not [name for name in names if ".tmp" in name or ".partial" in name]


def test_the_page_needs_no_network(page):
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    sources = re.findall(r"src='([^']{30})", page)
    assert len(sources) == page.count("<img") > 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_the_page_is_well_formed(page):
    class Checker(html.parser.HTMLParser):
        open = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "img"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            while (last := self.open.pop()) != tag:
                assert last in ("li", "html", "body"), f"{last} is closed by {tag}"

    Checker().feed(page)


def test_numbers_are_the_rows(page):
    rows = results.select(make_rows(), metric="accuracy", split="test", method="ties", task="lao")
    mean, spread = results.mean_std([row["value"] for row in rows])
    assert f"title='{100 * mean:.1f} ± {100 * spread:.1f} (" in page and f">{100 * mean:.1f}<small>" in page


def test_the_best_merge_is_bold_and_anchors_never_are(page):
    lines = [line for line in re.findall(r"<tr.*?</tr>", page) if "<td" in line and "<small>" in line]
    assert {re.search(r"<th>(.*?)</th>", line)[1] for line in lines if "<b>" in line} == {"consensus"}


def test_the_protocol_in_words(page):
    for words in ("validation", "Nothing is selected on the test", "mean over tasks of accuracy/accuracy",
                  "Seeds (0, 1)", "0123456789ab"):
        assert words in page
    assert "class=alarm" not in page


def test_selection_on_test_is_shouted_everywhere(tmp_path):
    report.write(make_folder(tmp_path, select_on="test"), command="x")
    page = (tmp_path / "report.html").read_text()
    assert "class=alarm>Hyper-parameters were selected on the TEST split" in page
    assert all("selected on the TEST split" in (tmp_path / name).read_text() for name in ("tables.md", "tables.tex"))


def test_a_distant_model_is_shouted(tmp_path):
    folder = make_folder(tmp_path)
    text = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(text.replace('"note": ""', '"note": "greek: far, 1.41"'))
    report.write(folder, command="x")
    assert "class=alarm>greek: far, 1.41" in (folder / "report.html").read_text()


def test_tables_list_methods_between_their_anchors(folder):
    run = report.Run({}, {}, make_rows(), "")
    table = report.table(run, "accuracy", 4)
    assert table.columns == ("method", "average", *TASKS)
    assert [line[0] for line in table.lines] == ["zero-shot", *METHODS, "fine-tuned"]
    assert (folder / "tables.md").read_text().count("| ties |") == 4
    assert (folder / "tables.tex").read_text().count(r"\toprule") == 4


def test_names_are_escaped(tmp_path):
    folder = make_folder(tmp_path, name="<b>&")
    report.write(folder, command="a < b")
    page = (folder / "report.html").read_text()
    assert "<h1>&lt;b&gt;&amp;</h1>" in page and "a &lt; b" in page


def test_an_empty_folder_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="no results"):
        report.write(tmp_path, command="")


def test_a_choice_at_the_end_of_the_grid_is_told():
    rows = make_rows()
    assert report_words.edges(report.Run({}, {}, rows, "")) == ""
    cut = [row for row in rows if not (row["metric"] == "trace" and row["scale"] == 1.0 and row["tasks"] == 2)]
    said = report_words.edges(report.Run({}, {}, cut, ""))
    assert "upper end" in said and "ties (2 tasks)" in said and "(4 tasks)" not in said


def test_summary_names_the_best():
    run = report.Run({"suite": "glyphs"}, {}, make_rows(), "")
    assert "The best single model is consensus" in report_words.summary(run)
