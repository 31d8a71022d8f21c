"""Pieces of an HTML page that stands alone: its frame, tables, pictures, folded text, for phones and dark rooms too."""
import base64
import html
import json
import struct

from tvjax import results


def page(title: str, parts) -> str:
    """A whole document."""
    return (f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<meta name=color-scheme content='light dark'>"
            f"<title>{html.escape(title)}</title><style>{CSS}</style><body>{''.join(parts)}</body></html>\n")


def paragraphs(text: str, kind: str = "") -> str:
    """Paragraphs of `text`, parted by empty lines, of a class of `CSS` where one is given.

    >>> paragraphs("a < b", kind="note")
    '<p class=note>a &lt; b</p>'
    """
    mark = f" class={kind}" if kind else ""
    return "".join(f"<p{mark}>{html.escape(' '.join(part.split()))}</p>" for part in text.split("\n\n") if part.strip())


def numbers(table: results.Table, *, scale: float = 1.0, digits: int = 1) -> str:
    """A table of numbers, mean ± deviation, or words, as `results.markdown` writes them."""
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in table.columns)
    line = lambda name, cells: f"<tr><th>{html.escape(str(name))}</th>" + "".join(
        f"<td>{html.escape(results.cell(x, scale=scale, digits=digits))}</td>" for x in cells) + "</tr>"
    body = "".join(line(name, cells) for name, *cells in table.lines)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def words(head, lines) -> str:
    """A table of words."""
    row = lambda cells, tag: "<tr>" + "".join(f"<{tag}>{html.escape(str(x))}</{tag}>" for x in cells) + "</tr>"
    body = "".join(row(cells, "td") for cells in lines)
    return f"<div class=wide><table class=plain><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table></div>"


def picture(name: str, body: bytes, caption: str) -> str:
    """A PNG, shown at half its pixels, inside the page."""
    data, (width,) = base64.b64encode(body).decode(), struct.unpack(">I", body[16:20])  # of the PNG's header
    return (f"<figure><div class=wide><img alt='{html.escape(name)}' width={width // 2} "
            f"src='data:image/png;base64,{data}'></div><figcaption>{html.escape(caption)}</figcaption></figure>")


def folded(title: str, content: dict) -> str:
    """JSON behind a title."""
    return f"<details><summary>{title}</summary><pre>{html.escape(json.dumps(content, indent=2))}</pre></details>"


CSS = """
:root{--ink:#222;--paper:#fff;--soft:#666;--line:#ddd;--thin:#eee;--tint:#f6f8fa;--grey:#777}
@media(prefers-color-scheme:dark){:root{--ink:#ddd;--paper:#16181c;--soft:#9aa0a8;--line:#3a3f47;--thin:#2a2e35;
--tint:#20242a;--grey:#9aa0a8}}
body{font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;color:var(--ink)}
body{background:var(--paper);max-width:72rem;margin:2rem auto;padding:0 1.2rem}h1{font-size:1.7rem;margin:0 0 .4rem}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem;border-bottom:1px solid var(--line);padding-bottom:.2rem}
h3{font-size:1rem;margin:1.2rem 0 .4rem;font-weight:600}
.lead{font-size:1.08rem}.note,figcaption{color:var(--soft);font-size:.86rem}
.alarm{background:#b00020;color:#fff;font-weight:600;padding:.7rem 1rem;border-radius:4px}
.wide{overflow-x:auto}table{border-collapse:separate;border-spacing:0;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .55rem;text-align:right;white-space:nowrap}
thead th{border-bottom:2px solid var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
tbody th,tbody td{border-bottom:1px solid var(--thin)}tbody th{font-weight:500}
table.judged td:nth-child(3){background:var(--tint)}tr.anchor{color:var(--grey)}
small{display:block;color:var(--grey);font-size:.78rem;line-height:1.1}
table.plain td,table.plain th{text-align:left;white-space:normal;background:none}
figure{margin:1.2rem 0}img{max-width:100%;height:auto;background:#fff;border-radius:4px}
pre{background:var(--tint);padding:.8rem;overflow-x:auto;font-size:.85rem}
summary{cursor:pointer;margin:.4rem 0}@media print{body{max-width:none;margin:0}figure{break-inside:avoid}}
@media(max-width:40rem){body{margin:1rem auto;padding:0 .7rem}h1{font-size:1.35rem}img{max-width:none;min-width:33rem}}
@media(prefers-color-scheme:dark){img{filter:brightness(.87)}}
"""
