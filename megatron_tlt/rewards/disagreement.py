"""Answers with equal numbers that differ all the same: in unit, month or base, or because one denies the number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_LONGEST = 300  # characters of a text whose words are those of one answer
_DENIED = re.compile(
    r"(?:\bnot|n't|n’t|\bnever|\bbut|\bexcept)\s*(?:equal\s+to|equals?|be|exactly|for)?\s*\$?[^\w\s.]?\s?-?[\d.,]*\d\)?\$?"
    r"[\s\w.%]{0,24}",
    re.IGNORECASE,
)
# A line for each quantity: its units between semicolons, each with its spellings (plurals are added).
_QUANTITIES = (
    (
        "mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; "
        "inch inches; ft foot feet; yd yard; mi mile"
    ),
    "mg milligram; g gram; kg kilogram; lb pound; oz ounce; ton tonne",
    "s sec second; min minute; h hr hour; day; week; month; yr year",
    "dollar usd $; cent ¢; euro eur €; gbp £; yen ¥; rupee ₹",
    "degree; rad radian",
    "ml milliliter millilitre; l liter litre; gal gallon; qt quart; pint",
)
_UNITS = {
    spelling: (quantity, unit)
    for quantity, units in enumerate(_QUANTITIES)
    for unit, words in enumerate(units.split(";"))
    for word in words.split()
    for spelling in (word, f"{word}s" if len(word) > 1 else word)
}
_SPEEDS = (
    ("mph", "miles/hour"),
    ("kmh", "km/hour"),
    ("kph", "km/hour"),
    (r"^\circ", " degrees"),
    ("°", " degrees"),
)
_COMMAND = re.compile(r"\\[A-Za-z]+\s*\{?|\\[,;:! ]|[{}~]")  # \text{ cm}
# Two letters or one are a unit behind a number or a slash only.
_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{3,}|(?<=[\d/])\s*[A-Za-z]{1,2}(?![A-Za-z])|[€£¥₹¢]|\\\$|\$(?=[\d.]+[^$]*$)")
_MONTHS = (
    "(Jan)(?:uary)? (Feb)(?:ruary)? (Mar)(?:ch)? (Apr)(?:il)? (May) (Jun)e? (Jul)y? (Aug)(?:ust)? (Sep)(?:t|tember)? "
    "(Oct)(?:ober)? (Nov)(?:ember)? (Dec)(?:ember)?"
).replace(" ", "|")
_MONTH = re.compile(rf"\b(?:{_MONTHS})\b\.?\s+\d|\d(?:st|nd|rd|th)?\s+(?:of\s+)?(?:{_MONTHS})\b")
_BASE = re.compile(r"\d_\{?(?:\\text\{)?(\d+|two|three|five|six|seven|eight|nine|ten)\}*$")
_EQUATION = re.compile(r"\$?(-?[\d,]*\.?\d+)\s*=\s*(-?[\d,]*\.?\d+)\$?")


def disagree(first: str, second: str) -> bool:
    """Whether the words or signs beside the numbers of a reference and of an answer exclude each other."""
    if max(len(first), len(second)) > _LONGEST:
        return False
    if _months(first) != _months(second):
        return True
    bases = [found[1] for text in (first, second) if (found := _BASE.search(text.strip("$. ")))]
    if len(set(bases)) > 1:
        return True
    units, others = _units(first), _units(second)
    return any(units[quantity].isdisjoint(others[quantity]) for quantity in units.keys() & others.keys())


def contradicts_itself(text: str) -> bool:
    """Whether the text ends by saying which number the answer is not, or equates two different numbers."""
    if len(text) > _LONGEST:
        return False
    equation = _EQUATION.fullmatch(text)
    is_false = equation is not None and _decimal(equation[1]) != _decimal(equation[2])
    return is_false or any(found.end() == len(text) for found in _DENIED.finditer(text))


def _decimal(number: str) -> Decimal:
    try:
        return Decimal(number.replace(",", ""))
    except InvalidOperation:
        return Decimal(0)


def _months(text: str) -> set[str]:
    return {month for found in _MONTH.finditer(text) for month in found.groups() if month}


def _units(text: str) -> dict[int, set[int]]:
    """Units of each quantity in the text, by their numbers in `_QUANTITIES`."""
    text = text.lower()
    for spelling, words in _SPEEDS:
        text = text.replace(spelling, words)
    found: dict[int, set[int]] = {}
    for word in _WORD.findall(_COMMAND.sub(" ", text)):
        unit = _UNITS.get(word.strip().lstrip("\\"))
        if unit is not None:
            found.setdefault(unit[0], set()).add(unit[1])
    return found
