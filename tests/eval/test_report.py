"""`ts-eval report`: the page stands alone and says what results.json holds."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from ts_eval import metrics
from ts_eval.cli import main
from ts_eval.report import TABLES, html, plots, read_results, texts
from ts_eval.report.headline import cards, identity_in_words
from ts_eval.report.table import acceptance_table, text_table, title_of


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory) -> Path:
    """A comparison with every kind of row, reported."""
    output = tmp_path_factory.mktemp("report") / "out"
    command = ["compare", "ar", "tokenswift", "tokenswift:tree=1,1:ngrams=0", "prompt-lookup", "hf", "--data-dir",
               str(data), "--prompt-tokens", "40", "--max-new-tokens", "30", "--runs", "2", "--tree", "1,2",
               "--ngrams", "2", "--output", str(output)]  # fmt: skip
    assert CliRunner().invoke(main, command).exit_code == 0
    done = CliRunner().invoke(main, ["report", str(output)])
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(output / f"report.{kind}") for kind in ("html", "md", "csv")]
    return output


class Page(HTMLParser):
    """What a page refers to, its tables' cells, its texts and its spans."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.references, self.cells, self.spans, self.words = [], [], [], [], []
        self.broken = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "wbr":  # a place where a long name may be broken
            self.broken = True
            return
        self.tags.append(tag)
        named = dict(attributes)
        self.references += [value for name, value in named.items() if name in ("src", "href", "xlink:href", "data")]
        if tag == "span":
            self.spans.append(named.get("class"))

    def handle_data(self, text):
        self.words.append(text)
        if self.tags and self.tags[-1] == "td":
            self.cells.append((self.cells.pop() if self.broken else "") + text)
        self.broken = False


def test_the_page_needs_no_network(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert "url(" not in text.replace("url(#", "") and "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_has_all_plots_in_the_pages_colours(folder):
    text = (folder / "report.html").read_text()
    titles = ["Latency along the length", "Speed-up along the length", "Acceptance by depth"]
    titles += ["Memory above the loaded model"]
    assert [title for title in titles if f"<h3>{title}</h3>" in text] == titles
    assert text.count("<svg") == len(titles)
    # No colour of the drawing is left that the theme does not decide.
    assert "#0300" not in text and "#010101" not in text and "var(--s0)" in text


def test_the_page_opens_with_each_methods_speed_up_and_identity(folder):
    results = json.loads((folder / "results.json").read_text())
    made = cards(results)
    # The fastest comes first, ar last; what transformers draws is another text.
    order = sorted(
        (name for name in results["methods"] if name != "ar"), key=lambda n: -results["methods"][n]["speedup"]
    )
    assert [card.method for card in made] == [*order, "ar"]
    by_name = {card.method: card for card in made}
    assert by_name["tokenswift"].figure == f"{results['methods']['tokenswift']['speedup']:.2f}x"
    assert by_name["tokenswift"].verdict == "same" and "all 2 texts the same" in by_name["tokenswift"].identity
    assert by_name["hf"].verdict == "none"
    text = (folder / "report.html").read_text()
    assert text.index('class="cards"') < text.index('class="about"') < text.index("<table")
    for card in made:
        assert card.figure.split()[0] in text[text.index('class="cards"') : text.index('class="about"')]


def test_the_page_says_what_is_faster_and_what_the_texts_are_each_in_its_own_way(folder):
    results = read_results(folder)
    results["methods"]["tokenswift"]["speedup"] = 0.24
    [card] = [card for card in cards(results) if card.method == "tokenswift"]
    assert (card.pace, card.verdict) == ("slower", "same")
    text = html(results)
    assert '<section class="card slower"><h2>tokenswift</h2>' in text
    assert '<span class="mark same">✓</span>all 2 texts' in text
    assert f"<h1>{title_of(results)}</h1>" in text and title_of(results).startswith("reference-model: ")


def test_prompts_without_titles_are_counted_in_the_title(folder):
    results = read_results(folder)
    run = results["methods"]["ar"]["runs"][0]
    results["methods"]["ar"]["runs"] = [{**run, "prompt": f"mixed.jsonl:{number}"} for number in (1, 2, 1, 4)]
    assert title_of(results) == "reference-model: 3 prompts of mixed.jsonl"
    results["methods"]["ar"]["runs"][1]["prompt"] = "a story: 2"
    assert title_of(results) == "reference-model: mixed.jsonl:1, a story: 2, mixed.jsonl:4"


def test_depths_at_which_hardly_anything_is_accepted_have_no_column(folder):
    results = read_results(folder)
    results["methods"]["tokenswift"]["acceptance_by_depth"] = [0.5, 0.0, 0.006, 0.004, 0.0, 0.0]
    results["methods"] = {name: results["methods"][name] for name in ("ar", "tokenswift")}
    header, rows = acceptance_table(results)
    assert header[-1] == "depth 3" and all(len(row) == len(header) for row in rows)


def test_a_slow_method_does_not_flatten_the_plot(folder):
    results = read_results(folder)
    name, place = "tokenswift", plots.PLOTS[0]
    before = plots.figure_of(place, results)[1].get_ylim()[1]
    for run in results["methods"][name]["runs"]:
        run["step_seconds"] = [100 * seconds for seconds in run["step_seconds"]]
    figure, axes = plots.figure_of(place, results)
    assert axes.get_ylim()[1] < 10 * before
    named = [label.get_text() for label in figure.legends[0].get_texts() if "above the plot" in label.get_text()]
    assert any(label.startswith(name) for label in named), "others may be slow as well on a busy machine"


def test_a_cell_of_the_page_holds_one_figure(folder):
    for make in TABLES.values():
        _, rows = make(read_results(folder))
        assert not [cell for row in rows for cell in row[1:] if " " in cell and cell[0].isdigit()]


def test_a_card_tells_a_tie_from_a_fault(folder):
    results = read_results(folder)
    row = results["methods"]["tokenswift"]
    row["runs"][0]["identical_to_ar"] = row["identical_to_ar"] = False
    row["first_divergence"], row["divergence_margin"] = 7, 1e-6
    results["settings"]["bitwise"] = False
    told = "1 of 2 texts the same as ar's, the first difference at token 7"
    assert identity_in_words(results, "tokenswift") == (f"{told}, a tie that rounding decides", "tie")
    results["settings"]["bitwise"] = True
    assert identity_in_words(results, "tokenswift") == (told, "other"), "no tie can be"
    results["settings"]["bitwise"] = False
    row["divergence_margin"] = 0.3
    assert identity_in_words(results, "tokenswift") == (told, "other")


def test_the_tables_hold_the_results(folder):
    results = json.loads((folder / "results.json").read_text())
    page = Page((folder / "report.html").read_text())
    for name, row in results["methods"].items():
        assert name in page.cells
        assert f"{row['tokens_per_second']:,.1f}" in page.cells
        assert f"{row['distinct']['2']:.3f}" in page.cells
        assert f"{row['perplexity']:,.1f}" in page.cells
    assert results["environment"]["platform"] in page.cells
    assert results["settings"]["model"] in page.cells


def test_measures_that_no_row_has_take_no_column(folder):
    """These texts are too short for Self-BLEU, and no embeddings were asked for."""
    header, rows = text_table(read_results(folder))
    assert not any(title.startswith(("Self-BLEU", "semantic")) for title in header)
    assert {"perplexity", "longest repeat"} < set(header)
    assert {len(row) for row in rows} == {len(header)} and rows[0][header.index("perplexity")] != "-"


def test_the_page_tells_the_command_as_it_is_typed(folder):
    page = Page((folder / "report.html").read_text())
    command = next(cell for cell in page.cells if cell.startswith("ts-eval compare ar tokenswift "))
    assert "--max-new-tokens 30 " in command and command in (folder / "report.md").read_text()
    assert "None" not in page.cells
    results = read_results(folder)
    results["environment"]["arguments"] = None
    assert "<td>arguments</td><td>-</td>" in html(results), "from Python there was no command"


def test_a_legend_of_many_long_names_leaves_the_plot_its_room(folder):
    results = read_results(folder)
    row = results["methods"]["tokenswift"]
    results["methods"] |= {f"tokenswift:tree=1,3,3,{n}:ngrams=20:sink=4": row for n in range(9)}
    figure, axes = plots.figure_of(plots.PLOTS[0], results)
    figure.draw_without_rendering()
    [legend] = figure.legends
    box, plot = legend.get_window_extent(), axes.get_window_extent()
    assert len(legend.get_texts()) == 14
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 and plot.y1 <= box.y0
    assert plot.height / figure.dpi > 2


def test_markdown_and_csv_hold_the_results(folder):
    results = json.loads((folder / "results.json").read_text())
    page = (folder / "report.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines[:7]}) == 1
    for name in results["methods"]:
        assert f"| {name} |" in page
    with open(folder / "report.csv", newline="") as rows:
        read = {row["method"]: row for row in csv.DictReader(rows)}
    assert list(read) == list(results["methods"])
    for name, row in results["methods"].items():
        assert float(read[name]["tokens_per_second"]) == row["tokens_per_second"]
        assert float(read[name]["distinct.mean"]) == row["distinct"]["mean"]
        assert float(read[name]["along_length.1.speedup"]) == row["along_length"][1]["speedup"]


def test_spans_are_the_text_with_its_accepted_and_repeated_tokens(folder):
    for row in read_results(folder)["methods"].values():
        for run in row["runs"]:
            spans = texts.spans_of(run)
            shown = "".join(piece for piece, _ in spans)
            assert len(shown) == len(run["text"]) == run["token_ends"][-1]
            assert all(a == b or a == "\ufffd" for a, b in zip(shown, run["text"], strict=True))
            flags = texts.accepted_tokens(run)
            assert len(flags) == 30
            if run["accepted"] is not None:
                assert sum(flags) == run["accepted"]


def test_spans_by_hand():
    # Two steps: a drafted token and one of the model's, then one of the model's; the first 8-gram comes twice.
    record = {
        "token_ids": [*range(8), 99, *range(8), 98],
        "token_ends": [*range(1, 19)],
        "text": "abcdefgh!abcdefgh\x07",
        "step_tokens": [8, 10],
        "step_accepted": [7, 16],
    }
    assert texts.spans_of(record) == [("abcdefg", "ar"), ("h", "r"), ("!", "a"), ("abcdefgh", "ar"), ("\ufffd", "")]
    assert metrics.repeated(record["token_ids"])[8] is False


def test_a_generated_script_is_text(folder):
    results = read_results(folder)
    run = results["methods"]["ar"]["runs"][0]
    run["text"] = "<script>alert(1)</script>".ljust(len(run["text"]))[: len(run["text"])]
    assert "<script>" not in html(results)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"methods": {"ar": {"runs": [1]}}}'])
def test_a_folder_without_results_is_refused_in_a_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "results.json" in result.stderr
    assert not (tmp_path / "report.html").exists()
