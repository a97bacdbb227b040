"""Texts by exit, as a terminal and a browser have them."""

import html.parser

from eejax.experiments.reproduce.exit_texts import exit_text, marked, page, predictions, visible


class Reader(html.parser.HTMLParser):
    """Text by the tags it is in, and tags opened but not closed."""

    def __init__(self, source):
        super().__init__()
        self.open, self.found = [], []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag in ("tr", "td", "th"):  # these end where the next begins
            while self.open and self.open[-1][0] in ("td", "th", *(["tr"] * (tag == "tr"))):
                self.open.pop()
        if tag not in ("meta",):
            self.open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        while self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        self.found.append((data, list(self.open)))

    def of(self, tag):
        """(text, attributes) of every run of text inside of that tag."""
        return [(d, dict(t)[tag]) for d, t in self.found if tag in dict(t)]


def test_marks_stand_where_the_exit_changes():
    text = [("de", 0), ("f", 0), (" m", 2), ("\n", 2), ("é", 1)]
    assert marked(text, (3, 8, 12)) == "⟨3⟩def⟨12⟩␣m\\n⟨8⟩é"
    assert marked([], (3,)) == "" and visible("a\t\x00") == "a\\t\\x00"


def test_a_page_has_every_token_as_it_is_on_the_color_of_its_exit():
    text = [("<b>", 0), ("&amp;", 1), ("\n  x", 2), (" y", 0)]
    source = page("t", [("h", exit_text("a < b", {"one": text}, (3, 8, 12)))], (3, 8, 12))
    reader = Reader(source)
    legend, shown = reader.of("span")[:3], reader.of("span")[3:]
    assert [d for d, _ in legend] == ["exit after 3", "exit after 8", "the final exit"]
    assert [d for d, _ in shown] == [piece for piece, _ in text]
    for (_, attributes), (_, exit_) in zip(shown, text, strict=True):
        assert attributes == legend[exit_][1]
    styles = [a.get("style") for _, a in legend]
    assert styles[2] is None and len(set(styles)) == 3
    assert ("a < b", {"class": "prompt"}) in reader.of("pre") and not reader.open


def test_predictions_are_marked_where_they_are_not_the_final_ones():
    predicted = [[("a", 0.25), ("<", 1.0)], [("a", 0.5), ("b", 0.75)]]
    same = [[True, False], [True, True]]
    reader = Reader(predictions("p", ["a", "b"], predicted, same, (3, 12)))
    assert [d for d, _ in reader.of("th")] == ["token", "after 3", "after 12"]
    cells = [(d.strip(), a.get("class")) for d, a in reader.of("td") if d.strip()]
    assert cells == [
        ("a", None),
        ("a", None),
        ("0.250", None),
        ("a", None),
        ("0.500", None),
        ("b", None),
        ("<", "other"),
        ("1.000", "other"),
        ("b", None),
        ("0.750", None),
    ]
