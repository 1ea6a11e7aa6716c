"""Probe texts: two encoders of one vocabulary are compared on them before one replaces the other."""

from typing import Final

PROBE_TEXTS: Final = (
    "",
    " ",
    "\n",
    "The quick brown fox doesn't jump; it's 12,345.67 miles away -- isn't it? I'LL say: WE'VE 1234567890.",
    "  two  spaces\tand\ttabs\n\n\nthen lines\r\nof Windows   \n trailing   ",
    'def f(x: int) -> int:\n    return x ** 2  # ±0.5\n\tif (a&&b)||!c: {"k": [1, 2.5e-3, null]}',
    "Größe, naïve café, ÅÄÖ, e\u0301 and \u00e9, ﬁ, Straße, İstanbul, ǅ",
    "Быстрая лиса. Μία αλεπού. השועל. الثعلب السريع. लोमड़ी। สุนัขจิ้งจอก 快速的棕色狐狸。きつねがジャンプ 여우가",
    "👩\u200d👩\u200d👧\u200d👦 🇩🇪 👍🏽 \u200b\u00a0\u3000\ufeff\u2028\x00\x07\x7f",
    "https://example.org/a?b=c&d=%20#e <a href='x'>y</a> C:\\dir\\file.txt user@host $PATH ${x} `q`",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)
"""Prose in several scripts, code, numbers, runs of white space, and control characters."""
