"""No call of a template into C fills the memory or takes for ever: it is refused before."""

from __future__ import annotations

import pytest

from batchrunner.core.errors import RowRefusedError
from batchrunner.input.templates import Predicate, Template

BIG = '{% set t = "x" * 1000000 %}'
NEST = (
    "{% set n = namespace(a=1, b=1) %}{% for i in range(40) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
KEY = "{% set n = namespace(a=1) %}{% for i in range(40) %}{% set n.a = (n.a, n.a) %}{% endfor %}"
TOO_LARGE = {
    "indent": '{{ ("a\n" * 1000)|indent(9999999) }}',
    "indent by text": BIG + '{{ ("a\n" * 1000)|indent(t) }}',
    "tabs": '{{ ("\t" * 10000).expandtabs(9999999) }}',
    "json indent": "{{ [1,2,3]|tojson(indent=9999999) }}",
    "percent": BIG + '{{ ("%s" * 1000) % ((t,) * 1000) }}',
    "format filter": BIG + '{{ ("%(a)s" * 1000)|format(a=t) }}',
    "widths": '{{ ("%9999999d" * 1000) % ((1,) * 1000) }}',
    "braces": BIG + '{{ ("{0}" * 1000).format(t) }}',
    "brace widths": '{{ ("{0:9999999}" * 1000).format(1) }}',
    "format_map": BIG + '{{ ("{a}" * 1000).format_map({"a": t}) }}',
    "join": BIG + "{{ ([1] * 1000)|join(t) }}",
    "join of a map": BIG + '{{ ([t] * 1000)|map("string")|join }}',
    "join method": BIG + '{{ t.join(["a"] * 1000) }}',
    "printed list": BIG + "{{ [t] * 1000 }}",
    "list as text": BIG + "{% set x = ([t] * 1000)|string %}{{ x|length }}",
    "list joined by ~": BIG + '{% set x = ([t] * 1000) ~ "" %}{{ x|length }}',
    "round": '{{ 1.5|round(100000000, "floor") }}',
    "translate": BIG + '{{ ("a" * 1000).translate({97: t}) }}',
    "rfind": '{{ ("a" * 9999999).rfind("b" ~ "a" * 999999) }}',
    "strip": '{{ ("a" * 9999999).strip("b" * 999999 ~ "a") }}',
    "to_bytes": '{{ (5).to_bytes(9999999999, "big")|length }}',
    "from_bytes": '{{ ((1).from_bytes(("a" * 9999999).encode(), "big") // 7) > 3 }}',
    "int by base": '{% set x = ("f" * 9999999)|int(0, 16) %}{{ (x // 7) > 3 }}',
    "split": '{{ ("x " * 30000000).split()|length }}',
    "list of a text": '{{ ("x" * 60000000)|list|length }}',
    "compared": NEST + "{{ n.a == n.b }}",
    "in": NEST + "{{ n.a in [n.b] }}",
    "test": NEST + "{{ n.a is eq(n.b) }}",
    "index": NEST + "{{ [n.b].index(n.a) }}",
    "printed nest": NEST + "{{ n.a }}",
    "key": KEY + "{{ {n.a: 1}|length }}",
    "looked up": KEY + '{{ {"a": 1}[n.a] }}',
    "bytes": '{{ ("x" * 1000).encode().replace("x".encode(), ("y" * 1000000).encode())|length }}',
    "wrapped": BIG + '{{ ("a b " * 1000)|wordwrap(1, true, t) }}',
    "linked": BIG + '{{ ("http://a.b " * 1000)|urlize(rel=t) }}',
    "sorted": NEST + "{{ [n.a, n.b]|sort|length }}",
}


def rendered(source: str) -> str:
    return Template(source, where="prompt.text", available=["text"]).render({"text": "a b"})


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_a_call_that_would_take_for_ever_is_refused(kind: str) -> None:
    """It could not be interrupted."""
    with pytest.raises(RowRefusedError, match=r"^template: not allowed: .*too large"):
        rendered(TOO_LARGE[kind])


def test_a_text_that_escaping_makes_huge_goes_no_further() -> None:
    """It may be five times as long as what it was made of."""
    with pytest.raises(RowRefusedError, match="too large"):
        rendered('{{ ("&" * 20000000)|e|e|length }}')


def test_lists_that_are_added_up_end() -> None:
    """Each list is copied once for all that follow it."""
    with pytest.raises(RowRefusedError, match="sum: 2000 lists are too large"):
        rendered("{{ ([[1] * 300] * 2000)|sum(start=[])|length }}")


def test_a_filter_is_bounded_too() -> None:
    """Its comparisons are those of a template."""
    nest = "[[[text] * 300] * 300] * 300"
    rows = Predicate(f"{nest} == {nest}", where="input.filter", available=["text"])
    with pytest.raises(RowRefusedError, match="too large"):
        rows({"text": "a"})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('{{ "%s is %5.2f" % (text, 1.5) }}', "a b is  1.50"),
        ('{{ "%(a)-4s|"|format(a=text) }}', "a b |"),
        ('{{ "{:>5}{0!r}{x[y]}".replace("0", "").format(text, text, x={"y": 1}) }}', "  a b'a b'1"),
        ('{{ {"a": [1, {"b": text}]}|tojson(indent=1)|length }}', "41"),
        ('{{ ["a", text]|map("upper")|join(", ") }}', "A, A B"),
        ('{{ text.split()|reverse|join("-") }}', "b-a"),
        ('{{ ("x\\n" * 3)|indent(2)|length }}', "10"),
        ("{{ 2.345|round(2) }} {{ 1.5|round(1, 'floor') }} {{ 17 // 5 }}", "2.35 1.5 3"),
        ('{{ "12"|int + "0x1f"|int(0, 16) }} {{ (5).to_bytes(2, "big")|length }}', "43 2"),
        ('{{ [3, 1, 2]|sort == [1, 2, 3] }} {{ 2 in [1, 2] }} {{ text is eq("a b") }}', "True True True"),
        ('{{ {("a", 1): text, "b": 2}[("a", 1)] }} {{ 1 < 2 <= 3 }} {{ not 3 > 4 }}', "a b True True"),
        ('{{ [[1], [2]]|sum(start=[])|length }} {{ [1, 2]|map("string")|list|length }}', "2 2"),
        ('{{ text.rfind("b") }} {{ " x ".strip() }} {{ text.translate({97: "A"}) }}', "2 x A b"),
        ('{{ "a b c d"|wordwrap(3, true, "/") }} {{ "<"|e|e }}', "a b/c d &lt;"),
    ],
)
def test_what_templates_are_for_is_not_refused(source: str, text: str) -> None:
    """The same calls with values of usual sizes."""
    assert rendered(source) == text
