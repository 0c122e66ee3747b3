"""Spellings of numbers in answers that math-verify does not read: currencies, markdown, units in words, Unicode.

Everything here rewrites text; what two texts are worth to each other is `rewards.math`.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_SPACES = re.compile(r"[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_INVISIBLE = re.compile(r"[\u200b-\u200d\u2060\ufeff]")
_SYMBOLS = str.maketrans(
    {"−": "-", "﹣": "-", "－": "-", "⁄": "/", "∕": "/", "÷": "/", "×": "*", "·": "*", "⋅": "*", "∙": "*"}
    | {"٫": ".", "٬": ",", "∅": r"\emptyset "}
    | {"，": ",", "．": ".", "％": "%", "＝": "=", "（": "(", "）": ")", "∞": r"\infty ", "π": r"\pi "}
)
_DASH = re.compile(r"(?<![\w)}\]])[‐‑‒–](?=\s?[\d.\\$])|(?<=\d)[‐‑‒–—](?=\d)")  # a minus sign, or that of a range
_FRACTIONS = {c: f"{n}/{d}" for c, n, d in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "112131234151357", "233445555668888")}
_FRACTION = re.compile(rf"(?<!\d)(\d*)\s?([{''.join(_FRACTIONS)}])")
_MIXED = re.compile(r"(?<![\d.,/^{(*+-])(?<![/^*+-]\s)(\d+)\s+(\d+)/(\d+)(?![\d/^]|[.,]\d)")
_POWERS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-"))
_POWER = re.compile(f"([{''.join(_POWERS)}]+)")
_ROOT = re.compile(r"√\s?(\d+(?:\.\d+)?|[A-Za-z]|\([^()]*\))")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,3})(?![\w.])")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))")
_PI = re.compile(r"(?<![A-Za-z\\{])pi(?![A-Za-z}])")
_INFINITY = re.compile(r"(?<![A-Za-z\\])infinity(?![A-Za-z])")
_EMPHASIS = tuple(
    re.compile(rf"(?<![\w)\]}}\\]){mark}(?![\s*_])([^\n]{{1,200}}?)(?<![\s*_]){mark}(?![\w(])")
    for mark in (r"\*\*\*", r"\*\*", r"\*", "___", "__", "_", "`")
)
_QUOTES = "\"'“”‘’«»"
_CURRENCY_COMMAND = re.compile(r"\\(?:pounds|euro|yen|textdollar|texteuro|textyen|textsterling)(?![A-Za-z])")
_ESCAPED_DOLLAR = re.compile(r"\\(?:text|mathrm)\{\s*\\?\$\s*\}|\\\$(?:\\[,;: ]|[\s~])*(?=-?[\d.])|(?<=\d)\s*\\\$")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\})(?=\d{3}(?!\d))")
_DOLLAR = re.compile(r"(?<!\\)\$")
_CHOICE = re.compile(r"(?:(?i:option|choice|answer)[\s:]+)?\(?([A-Z])[).:]*")
_LETTERED = re.compile(
    r"(?:\\(?:text|mathrm|mathbf|textbf)\{)?\(?([A-J])(?:[).:]+|(?=\}?$))\}?(?:[\s~\\](.*))?", re.DOTALL
)
_OTHER_LETTER = re.compile(r"(?<![A-Za-z\\])[B-J](?![A-Za-z'])")
_RATIO = re.compile(r"(\d+)\s+to\s+(\d+)")
_CLOCK = re.compile(r"(?<=\d)\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)
_SIGN = re.compile(r"(?<![\w)}])([-+])\s+(?=[\d.])")
_MINUS = re.compile(r"(?:negative|minus)\s+(?=[\d.])", re.IGNORECASE)
_BOX = re.compile(r"\\(?:fbox|boxed)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_JOINS = re.compile(  # a comma, "and" or "or", beside signs that say nothing and names of variables
    r"(?is)(?=.*(?:[,;]|\b(?:and|or)\b))(?:[\s$()\[\]{},;!\\]|text|mathrm|q?quad|and|or|[a-z]_?\{?\w{0,3}\}?\s*=)*"
)
_DISPLAY = re.compile(r"(?<!\\)(?:\$\$|\\\[)((?:[^\\$]|\\[^\[\]]|\$(?!\$))*+)(?:\$\$|\\\])")
_MARKER = re.compile(  # a line behind #### that has words and a number is a heading: Step 2, 2. Times two
    r"(?i)(?:\banswer(?:\s+is|[\s*]*:)|<answer>"
    r"|(?<!#)#{4,}+(?![ \t*]*(?:\d+[.)][ \t*]+[a-z]|[a-z]{2}[^\n#]*\d)))[\s:]*"
)
_NEXT_SENTENCE = re.compile(r"\.\s.*")
_BECAUSE = re.compile(
    r"(?i)[,;]?\s(?:because|since)\b.*|[,;]\s+(?:as|which|where|(?:or\s+)?(?:about|approximately|roughly))\b.*"
)
_SO = {"so", "thus", "hence", "therefore"}
_WORDS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
_VALUE = re.compile(r"[\d\\$^=_{}()+*/<>]|(?<![A-Za-z'’])[A-HJ-Zb-z](?![A-Za-z'’])")  # no words alone
_HTML = re.compile(r"(?i)</?(?:b|strong|i|em|u|mark|code|span|p|div|font|center)(?:\s[^<>]*)?>")
# 1.234,50 and 1.234.567; 1_000 and 1'000. One group behind one point stays a fraction.
_POINTS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,})(?![,.]?\d)")
_GROUPS = re.compile(r"(?<=\d)[_'’](?=\d{3}(?!\d))")
_AMOUNT = r"(?<![\d.,])(\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)"
_MAGNITUDE = re.compile(_AMOUNT + r"((?:[\s~-]|\\[,;: ]|\\[a-z]+\{)*)(hundred|thousand|million|billion|trillion)\b")
_MONEY = re.compile(rf"(\\\$|[€£¥₹]|(?<![\\\w])\$(?![^\n$]*\$))\s?{_AMOUNT}\s?(bn|[kKMB])\b")
_FACTORS = {"hundred": 2, "thousand": 3, "k": 3, "million": 6, "m": 6, "billion": 9, "b": 9, "bn": 9, "trillion": 12}
_FLOAT_DIGITS = 15  # longer numbers stay powers of ten, which math-verify compares exactly
_LONGEST = 300  # characters of a text that is one number among words
_SMALL = re.compile(r"-?0?\.(0{5,})[1-9]")

# One number or fraction: 1,000.50; 1 000; 1000,99; .5; 3/4; 2*10^3
_DIGITS = r"(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)(?:\.\d+)?|\d+[.,]\d+|\.\d+|\d+)"
_NUMBER = rf"(?:[-+]\s?)?(?:{_DIGITS}(?:\s?/\s?{_DIGITS})?|\(\d+\+\d+/\d+\)|{_DIGITS}\s?\*\s?10\^\(?[-+]?\d{{1,3}}\)?)"
_AROUND = r"""[^\d\\{}\[\]<>=|^+*/≠≤≥±√∈∪∩!-]"""  # words and their punctuation: nothing that calculates
_SQUARE_UNIT = re.compile(r"(?<![A-Za-z])(?:[kcdmnµ]?m|ft|in|yd|mi)\s?\^\s?[({]?[23][)}]?")
_UNIT_POWER = re.compile(r"(?<=[A-Za-zµΩ°])\s?\^\s?[({]?-?\d[)}]?")
_REMARK = re.compile(r"\(\s*[A-Za-z][A-Za-z\s-]*\)")  # 16 (sixteen)
_UNIT_SIGN = re.compile(r"(?<=[A-Za-zµΩ°%])\s?[/*-]\s?(?=[A-Za-z])")  # km/h, kg*m, foot-pounds
_UNIT_LINK = re.compile(r"(?<=\d)(?:-|\s?/\s?)(?=[A-Za-z]{2})")  # 5-foot, 18/day
_LEAD = re.compile(r"[A-Za-z][\w\s']{0,40}=\s*|.*(?:\b(?:is|are|was|were|equals)|\bit's|:)\s", re.DOTALL)
_QUANTITY = re.compile(rf"({_AROUND}*?)({_NUMBER})(\s?%)?({_AROUND}*)")
# Words by which a text with one number means another value.
_CHANGES_VALUE = re.compile(
    r"\b(?:not|never|isn|cannot|nor|neither|than|but|except|minus|negative|half|twice|double|triple|squared|cubed|factorial|mod|modulo"
    r"|sqrt|root|sin|cos|tan|cot|sec|csc|log|ln|lg|exp|pi|max|min|gcd|lcm)\b",
    re.IGNORECASE,
)
_GLUED = re.compile(r"[A-Za-z]{1,2}(?![A-Za-z])|\(")  # behind a number without a space: 18x, 7(2)
# A variable: neither the article nor a unit (volt, newton, gram ..).
_LONE_LETTER = re.compile(r"(?<![A-Za-z'’.])[b-fi-kn-rt-zBDEGHIMO-UX-Z](?![A-Za-z'’.])")


def plain(text: str) -> str:
    """`text` with Unicode's spaces, signs, digits, fractions, powers and roots, `1e3`, `1 1/2`, `\\$5` and `pi` in the
    spelling that math-verify reads, and without markdown's emphasis. Mathematics in LaTeX stays as it is.
    """
    text = _INVISIBLE.sub("", _SPACES.sub(" ", text))
    if not text.isascii():
        text = _ascii(text)
    text = _GROUPS.sub("", _HTML.sub("", text)).replace(r"\varnothing", r"\emptyset")
    text = _POINTS.sub(lambda found: found[0].replace(".", "").replace(",", "."), text)
    text = _MONEY.sub(lambda found: found[1] + _times(found[2], found[3]), text)
    text = _MAGNITUDE.sub(lambda found: _times(found[1], found[3]) + found[2], text)
    text = _ESCAPED_DOLLAR.sub("", _CURRENCY_COMMAND.sub("", _THOUSANDS.sub(",", text)))
    for emphasis in _EMPHASIS:
        text = emphasis.sub(r"\1", text)
    text = _TIMES_TEN.sub("*", text).replace("**", "^")
    text = _SCIENTIFIC.sub(lambda found: _written_out(found[0]), text)
    text = _MIXED.sub(r"(\1+\2/\3)", text)
    return _INFINITY.sub(r"\\infty ", _PI.sub(r"\\pi ", text)).strip()


def plain_answer(text: str) -> str:
    """`plain` of a text that is an answer and nothing else: without quotes, currency signs and the final period."""
    text = plain(text).strip(_QUOTES + " \n\t").rstrip(".;, \\")
    inner = text.strip("$ ")
    if (found := boxes(inner)) and found[0][0] == 0 and found[0][2] == len(inner):
        text = inner[found[0][1] : -1]
    if len(_DOLLAR.findall(text)) % 2:  # the sign of a currency: those of mathematics are pairs
        text = _DOLLAR.sub(" ", text)
    text = "".join(" " if unicodedata.category(c) == "Sc" and c != "$" else c for c in text)
    text = _CLOCK.sub(r" \1m", _MINUS.sub("-", _SIGN.sub(r"\1", text))).strip()
    if ratio := _RATIO.fullmatch(text):
        text = f"{ratio[1]}:{ratio[2]}"
    letter = _CHOICE.fullmatch(text)
    return letter[1] if letter else text


def boxes(text: str) -> list[tuple[int, int, int]]:
    """Where every closed `\\boxed{..}` begins, where its content does, and where it ends, in order of their begins."""
    begins = {box.end(): box.start() for box in _BOX.finditer(text)}
    found, opened = [], []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened and (inner := opened.pop()) in begins:
            found.append((begins[inner], inner, brace.end()))
    return sorted(found)


def conclusion(response: str) -> tuple[str, str]:
    """The part of a response that is its answer; where that is words or reasoning also the text to find a number in.

    It is the last box that is not empty, with those that commas, "and" or "or" join to it; else the sentence behind the
    last "answer is", "Answer:", `####` or `<answer>` that has a value, else behind the last one; else a lone line.
    """
    if boxed := _last_boxes(response):
        return boxed, ""
    text = re.sub("(?i)</answer>", "\n", _DISPLAY.sub(lambda formula: f"${' '.join(formula[1].split())}$", response))
    lines = [line for piece in _MARKER.split(text)[1:] if (line := _first_line(piece))]
    named = [(_statement(line), f"answer: {line}") for line in lines]
    if not named and "\n" not in response and len(response) <= _LONGEST:
        named = [(_BECAUSE.sub("", response), response)]
    valued = next((pair for pair in reversed(named) if _VALUE.search(plain_answer(pair[0]))), None)
    answer, source = valued or (named[-1][0] if named else "", response)
    return answer, "" if _is_alone(answer) else source


def _last_boxes(response: str) -> str:
    contents: list[str] = []
    begin = 0
    for start, inner, end in reversed(boxes(response)):
        if contents and not (end <= begin and _JOINS.fullmatch(response, end, begin)):
            break
        if is_comparable(content := response[inner : end - 1]):
            contents.append(content)
            begin = start
    return ", ".join(dict.fromkeys(reversed(contents)))


def _first_line(text: str) -> str:
    """The first line that has something and does not lead to the next one."""
    lines = (line for line in text.splitlines() if not line.rstrip("* ").endswith(":"))
    return next(filter(is_comparable, lines), "")


def _statement(line: str) -> str:
    """The first sentence of a line, without what explains it."""
    answer = _BECAUSE.sub("", _NEXT_SENTENCE.sub("", line)).strip()
    return answer.strip("*") if answer.count("**") % 2 else answer  # **Answer: 18**


def _is_alone(answer: str) -> bool:
    """Whether it has a value, and is no reasoning with several numbers."""
    found = plain_answer(answer)
    words = _WORDS.findall(found.lower())
    is_sentence = not _SO.isdisjoint(words) or (len(words) > 2 and (found[:1].isalpha() or "=" in found))
    return quantity(last_clause(found)) is not None or (not is_sentence and _VALUE.search(found) is not None)


def choice(answer: str) -> str | None:
    """The letter of an answer that is one of several choices: "C", "(C) 12 cm", "C. the cat"; else None."""
    found = _LETTERED.fullmatch(answer)
    return None if found is None or _OTHER_LETTER.search(found[2] or "") else found[1]


def is_comparable(reference: str) -> bool:
    """Whether a response can equal the reference answer: it has a letter, a digit or the brace of a set."""
    return reference.isdecimal() or re.search(r"[^\W_]|\\\{", plain_answer(reference)) is not None


def quantity(text: str) -> str | None:
    """The number, fraction or percentage of an answer that is one number among words, as in "50 km/h"; else None.

    Words behind the number are its unit, whatever they are. None for anything that calculates ("x + 18", "18x"), for
    several numbers ("18 or 19", "(1, 18)") and for words that deny or change the number.
    """
    if len(text) > _LONGEST:
        return None
    text = _UNIT_POWER.sub("", _SQUARE_UNIT.sub(" units", text))
    text = _UNIT_LINK.sub(" ", _UNIT_SIGN.sub("", text))
    found = _QUANTITY.fullmatch(_REMARK.sub(" ", text))
    if found is None:
        return None
    before, number, percent, behind = found.groups()
    words = f"{before} {behind}"
    if _CHANGES_VALUE.search(words) or _GLUED.match(behind) or before[-1:].isalpha() or _LONE_LETTER.search(words):
        return None
    return number.replace("- ", "-").replace("+ ", "").lstrip("+") + ("%" if percent else "")


def last_clause(text: str) -> str:
    """The text behind its last "is", "=" after words, or colon: "x = 18 cm" and "the sum is 18 cm" end in "18 cm"."""
    lead = _LEAD.match(text)
    return text[lead.end() :] if lead else text


def decimals(number: str | None) -> int:
    """Decimals to which a number is compared: math-verify's 6, and two behind the first digit of a smaller number."""
    small = _SMALL.match(number or "")
    return len(small[1]) + 3 if small else 6


def _ascii(text: str) -> str:
    text = _DASH.sub("-", text.translate(_SYMBOLS))
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    text = _FRACTION.sub(lambda found: f"{found[1]} {_FRACTIONS[found[2]]}" if found[1] else _FRACTIONS[found[2]], text)
    text = _POWER.sub(lambda found: "^" + _braced("".join(_POWERS[c] for c in found[1])), text)
    return _ROOT.sub(r"\\sqrt{\1}", text)


def _braced(exponent: str) -> str:
    return exponent if len(exponent) == 1 else f"{{{exponent}}}"


def _times(number: str, word: str) -> str:
    return format(Decimal(number.replace(",", "")).scaleb(_FACTORS[word.lower()]).normalize(), "f")


def _written_out(number: str) -> str:
    digits = format(Decimal(number), "f")
    mantissa, _, exponent = number.lower().partition("e")
    return digits if len(digits) <= _FLOAT_DIGITS else f"{mantissa}*10^{{{int(exponent)}}}"
