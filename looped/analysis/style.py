"""The style sheet of the report: light and dark, wide and narrow."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfaf8; --card: #ffffff; --ink: #1d1c1a; --soft: #5d5a55; --faint: #85817a;
  --rule: #e4e1db; --grid: #ebe8e3; --axis: #b9b5ad;
  --s1: #2563c9; --s2: #c2570c; --s3: #7c3aa8; --s4: #0f7b6c; --fixed: #85817a;
  --bar: #2563c9; --base: #a8a49c; --bound: #b3261e; --code: #f3f1ed;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #141413; --card: #1d1c1b; --ink: #efedea; --soft: #b3afa8; --faint: #8d8981;
    --rule: #34322f; --grid: #2b2a28; --axis: #5c5954;
    --s1: #6ea3f5; --s2: #f0904c; --s3: #c294ea; --s4: #4fbfae; --fixed: #8d8981;
    --bar: #3f78d6; --base: #5c5954; --bound: #f2837b; --code: #272624;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 960px; margin: 0 auto; padding: 40px 20px 64px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.015em; text-wrap: balance; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 6px; letter-spacing: -0.01em; text-wrap: balance; }
h3 { font-size: 0.95rem; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 72ch; }
.lead, .note { color: var(--soft); }
.note { font-size: 0.875rem; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 22px;
  margin-top: 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin-top: 24px; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 16px 18px; }
.tile b { display: block; font-size: 1.75rem; line-height: 1.15; font-weight: 650; letter-spacing: -0.02em; }
.tile span { display: block; color: var(--soft); font-size: 0.875rem; margin-top: 4px; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 272px), 1fr)); gap: 18px; }
.panels.single { grid-template-columns: minmax(0, 460px); }
figure { margin: 0; display: flex; flex-direction: column; justify-content: space-between; }
figcaption { font-size: 0.875rem; color: var(--soft); margin-bottom: 4px; }
figcaption b { color: var(--ink); font-size: 0.95rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.wide { overflow-x: auto; }
.wide svg { min-width: 460px; max-width: 760px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 14px; padding: 0;
  font-size: 0.875rem; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 7px; }
.swatch svg { width: 26px; min-width: 0; }
.chip { width: 12px; height: 12px; border-radius: 3px; }
text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--faint); }
text.label { fill: var(--soft); }
text.name { font-size: 13px; fill: var(--ink); }
text.inbar { font-size: 12.5px; font-weight: 600; fill: #ffffff; }
text.indepth { font-size: 11px; font-weight: 600; fill: #ffffff; }
text.boundtext { font-size: 12px; fill: var(--bound); }
.grid { stroke: var(--grid); } .axis { stroke: var(--axis); }
.bar { fill: var(--bar); } .bar.base { fill: #77736b; }
.whisker { stroke: var(--ink); stroke-width: 2; stroke-opacity: 0.7; }
.bound { stroke: var(--bound); stroke-width: 1.5; stroke-dasharray: 5 4; }
.series { fill: none; stroke-width: 2; stroke-linejoin: round; }
.error { stroke-width: 1.25; stroke-opacity: 0.65; }
.mark { stroke: var(--card); stroke-width: 1.5; } .mark .hit { fill: transparent; stroke: none; }
.series.fixed { stroke: var(--fixed); stroke-dasharray: 4 3; } .error.fixed { stroke: var(--fixed); }
.mark.fixed { fill: var(--fixed); }
.series.s1, .error.s1 { stroke: var(--s1); } .mark.s1 { fill: var(--s1); }
.series.s2, .error.s2 { stroke: var(--s2); } .mark.s2 { fill: var(--s2); }
.series.s3, .error.s3 { stroke: var(--s3); } .mark.s3 { fill: var(--s3); }
.series.s4, .error.s4 { stroke: var(--s4); } .mark.s4 { fill: var(--s4); }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.words, th.words { text-align: left; white-space: normal; }
tr:last-child td { border-bottom: 0; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); font-size: 0.875rem; }
details .table { margin-top: 8px; }
.tokens { font-size: 1.02rem; line-height: 1.75; font-weight: 550; white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--page); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; margin: 6px 0 4px; }
.tokens span { cursor: help; border-radius: 3px; }
.tokens span:hover { outline: 1.5px solid currentColor; outline-offset: 1px; }
.question { margin: 16px 0 0; }
pre, code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 0.8125rem; }
pre { background: var(--code); border-radius: 8px; padding: 12px 14px; overflow-x: auto; margin: 4px 0 14px; }
footer { color: var(--faint); font-size: 0.8125rem; margin-top: 24px; }
@media (max-width: 560px) {
  main { padding: 24px 12px 40px; } section { padding: 16px 14px; } h1 { font-size: 1.6rem; }
}
@media print { section, .tile { break-inside: avoid; } }
"""
