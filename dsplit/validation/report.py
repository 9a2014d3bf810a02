"""`report.html`: one page that needs nothing else, neither network nor the files beside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from dsplit.validation.pictures import Pair

STYLE = """
:root { color-scheme: light dark; --page: #f3f4f6; --card: #fff; --text: #16181d; --faint: #5f6673; --line: #dfe2e7;
  --good: #11703c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14161a; --card: #1e2127; --text: #eceef2; --faint: #9aa3b2; --line: #323843;
    --good: #5bd08d; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { margin: 0; font-size: 30px; line-height: 1.25; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 14px; font-size: 19px; }
.faint { color: var(--faint); margin: 6px 0 0; }
.pairs { display: grid; gap: 22px; grid-template-columns: repeat(auto-fill, minmax(min(520px, 100%), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 18px; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
figure { margin: 0; }
figcaption { color: var(--faint); font-size: 14px; margin-bottom: 6px; }
figure img { display: block; width: 100%; border-radius: 8px; outline: 1px solid var(--line); }
img.small { image-rendering: pixelated; }
.prompt { margin: 14px 0 0; font-weight: 600; overflow-wrap: anywhere; white-space: pre-wrap; }
.wide { display: block; max-width: 100%; border-radius: 8px; background: #fff; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 7px 0; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
th { width: 320px; color: var(--faint); font-weight: 400; padding-right: 24px; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.good { color: var(--good); } .bad { color: var(--bad); } .good, .bad { font-weight: 600; }
"""
PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="faint">$subtitle</p>
$body
</main>
</body>
</html>
""")
SMALL = 256  # pictures below this many pixels are shown with hard pixel edges, as they are


def page(
    title: str,
    subtitle: str,
    pairs: Sequence[Pair],
    settings: Mapping[str, Any],
    loss_curve: Path | None = None,
    parity: Mapping[str, Any] | None = None,
) -> str:
    """The HTML of a report. Pictures are embedded; every text is escaped."""
    body = []
    if pairs:
        body += ["<h2>Without and with the LoRA</h2>", f'<div class="pairs">{"".join(map(_card, pairs))}</div>']
    if parity is not None:
        body += ["<h2>Split against unsplit</h2>", f'<div class="card">{_parity(parity)}</div>']
    if loss_curve is not None:
        picture = f'<img class="wide" alt="Training loss by step" src="{_embedded(loss_curve)}">'
        body += ["<h2>Training loss</h2>", f'<div class="card">{picture}</div>']
    body += ["<h2>Settings</h2>", f'<div class="card">{_table(settings)}</div>']
    return PAGE.substitute(title=html.escape(title), subtitle=html.escape(subtitle), style=STYLE, body="\n".join(body))


def _card(pair: Pair) -> str:
    from PIL import Image

    sides = []
    for label, path in (("without LoRA", pair.base), ("with LoRA", pair.lora)):
        with Image.open(path) as picture:
            kind = ' class="small"' if max(picture.size) < SMALL else ""
        alt = html.escape(f"{pair.prompt}, {label}", quote=True)
        sides.append(
            f'<figure><figcaption>{label}</figcaption><img{kind} alt="{alt}" src="{_embedded(path)}"></figure>'
        )
    prompt = html.escape(pair.prompt if pair.prompt.strip() else "(empty prompt)")
    return (
        f'<article class="card"><div class="sides">{"".join(sides)}</div>'
        f'<p class="prompt">{prompt}</p><p class="faint">seed {pair.seed}</p></article>'
    )


def _parity(parity: Mapping[str, Any]) -> str:
    verdict = (
        '<span class="good">equal within the tolerance</span>'
        if parity["ok"]
        else '<span class="bad">different: the cache and the live encoders disagree</span>'
    )
    rows = {
        "Rows compared": parity["rows"],
        "Largest difference, cached values": f"{parity['max_value']:g}",
        "Largest difference, loss": f"{parity['max_loss']:g}",
        "Largest difference, gradient": f"{parity['max_gradient']:g}",
        "Tolerance": f"{parity['tolerance']:g}",
    }
    return f'{_table(rows)}<p class="prompt">{verdict}</p>'


def _table(rows: Mapping[str, Any]) -> str:
    cells = (f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows.items())
    return f"<table>{''.join(cells)}</table>"


def _embedded(path: Path) -> str:
    """A PNG file as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
