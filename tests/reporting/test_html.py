"""HTML is escaped by construction."""

import json

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.reporting.page.html import (
    Markup,
    asset,
    data_script,
    join,
    raw_data_script,
    table,
    tag,
)


def test_text_is_escaped_and_markup_is_not() -> None:
    """Only `Markup` reaches the page as it is; attributes are escaped like text."""
    made = tag(
        "p", "<b>&", Markup("<i>x</i>"), None, title='"<', class_="a", hidden=False, data_x=True
    )
    assert made == '<p title="&quot;&lt;" class="a" data-x>&lt;b&gt;&amp;<i>x</i></p>'


def test_void_elements_have_no_end() -> None:
    """Elements without content are not closed."""
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_join_escapes_and_skips_none() -> None:
    """Joining plain text escapes it, and None leaves nothing."""
    assert join(("a<", None, Markup("<br>")), " ") == "a&lt; <br>"


JSON = st.recursive(
    st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(JSON)
def test_data_in_scripts_survives_and_cannot_break_out(value: object) -> None:
    """Embedded JSON holds no markup character, and reads back as what went in."""
    made = data_script("d", value)
    body = made.removeprefix('<script type="application/json" id="d">').removesuffix("</script>")
    assert not set("<>&") & set(body)
    assert json.loads(body) == value


def test_raw_json_keeps_its_meaning() -> None:
    """JSON text with a closing script tag inside a string is still the same JSON."""
    text = '{"name": "</script><!--&"}'
    made = raw_data_script("d", text)
    assert made.count("</script>") == 1
    assert json.loads(made.split(">", 1)[1].removesuffix("</script>")) == json.loads(text)


def test_table_marks_numbers_and_the_chosen_row() -> None:
    """Numeric columns and the highlighted row carry their classes; the caption names the region."""
    made = table(("a", "b"), [("x", "1"), ("y", "2")], caption="C", numeric=(1,), highlight=1)
    assert '<th class="n" scope="col">b</th>' in made
    assert '<tr class="chosen"><td>y</td><td class="n">2</td></tr>' in made
    assert made.startswith('<div class="scroll" tabindex="0" role="region" aria-label="C">')


def test_assets_ship_with_the_package() -> None:
    """Style and script are read from inside the package, and fetch nothing."""
    for name in ("page.css", "page.js"):
        text = asset(name)
        assert "http" not in text
        assert "@import" not in text
        assert "url(" not in text.replace("URL(", "")
