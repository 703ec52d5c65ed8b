"""The style sheet: light or dark as the system is, and readable on a phone."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --line: #8885; --faint: #8882; --wrong: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --wrong: #ff897d; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto 3rem; padding: 0 1rem; }
header { border-bottom: 1px solid var(--line); padding: .8rem 0; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; } nav a { white-space: nowrap; }
h1 { overflow-wrap: anywhere; }
h2 { margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 100%; }
caption { text-align: left; padding: .3rem 0; opacity: .8; }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); }
tbody th { font-weight: normal; } tbody th:not(.long) { white-space: nowrap; }
nav a[aria-current] { font-weight: 600; text-decoration: none; color: inherit; }
.long { min-width: 18rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 0; }
figure img { width: 100%; background: #fff; border: 1px solid var(--line); }
svg.bar { display: block; width: 100%; min-width: 12rem; height: 1.1rem; background: var(--faint); }
svg.key { width: .8rem; height: .8rem; margin-right: .3rem; vertical-align: -.05rem; }
ul.keys { list-style: none; padding: 0; } ul.keys li { display: inline-block; margin-right: 1.2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; }
dt { opacity: .8; } dd { margin: 0; overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
pre { background: var(--faint); padding: .8rem; overflow-x: auto; }
form.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem 1.5rem; }
form.fields > * { min-width: 0; } form.fields .wide { grid-column: 1 / -1; }
label { display: block; font-weight: 600; }
input, select, textarea { font: inherit; width: 100%; padding: .4rem; }
button { font: inherit; padding: .5rem 1.2rem; }
.hint { display: block; font-size: .9em; opacity: .8; }
.wrong { color: var(--wrong); font-weight: 600; }
@media (max-width: 40rem) {
  .wordy, .wordy tbody, .wordy tr, .wordy th, .wordy td, .wordy caption { display: block; }
  .wordy thead { display: none; }
  .wordy tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .wordy tbody th, .wordy td { border: 0; padding: .1rem 0; text-align: left; white-space: normal; min-width: 0; }
  .wordy tbody th { font-weight: 600; }
  .wordy td:empty { display: none; }
  .wordy td::before { content: attr(data-head) ": "; opacity: .8; }
}
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .6rem; } }
@media print { header, form { display: none; } }
"""
