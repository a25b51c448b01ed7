"""The report's style sheet. Colours: Okabe and Ito's palette for colour-blind readers, darker where it is text."""

CSS = """
:root{color-scheme:light dark;
 --bg:#fff;--ink:#1a1f26;--muted:#5a6472;--line:#dde2e8;--panel:#f5f7f9;--blue:#0072b2;--green:#00734f;--red:#a83e00;
 --amber:#7a5600;--good-bg:#e6f4ee;--warn-bg:#fdf3dc;--bad-bg:#fbe9e0;
 --s0:#d55e00;--s1:#e69f00;--s2:#56b4e9;--s3:#cc79a7;--s4:#0072b2;--s5:#b8a800;--s6:#7d7d7d;--s7:#5e3c99;--s8:#b0b0b0;
 --served:#009e73}
@media (prefers-color-scheme:dark){:root{
 --bg:#12161b;--ink:#e7eaee;--muted:#9ba6b3;--line:#2d353e;--panel:#1a2027;--blue:#64b8ec;--green:#45cfa0;--red:#ff9a61;
 --amber:#f0c052;--good-bg:#12291f;--warn-bg:#2d2510;--bad-bg:#331c10}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
 "Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:40px 24px 56px}
header{padding-bottom:8px}
.kicker{margin:0;color:var(--muted);font-size:.8rem;letter-spacing:.06em;text-transform:uppercase}
h1{margin:.25em 0 .3em;font-size:clamp(1.55rem,1.1rem + 2vw,2.35rem);line-height:1.2;letter-spacing:-.015em;
 text-wrap:balance}
h1.good{color:var(--green)}h1.warn{color:var(--ink)}h1.bad{color:var(--red)}
.support{margin:0 0 14px;font-size:1.06rem;max-width:70ch}
.chips{display:flex;flex-wrap:wrap;gap:6px;margin:0 0 20px;padding:0;list-style:none}
.chips li{padding:2px 10px;border:1px solid var(--line);border-radius:99px;font-size:.82rem;color:var(--muted)}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;padding:10px 0;border-block:1px solid var(--line);font-size:.9rem}
a{color:var(--blue);text-decoration:none}a:hover{text-decoration:underline}
a:focus-visible,summary:focus-visible{outline:2px solid var(--blue);outline-offset:2px}
section{margin-top:38px}
h2{margin:0 0 12px;font-size:1.25rem;letter-spacing:-.005em}
p{margin:.5em 0;max-width:75ch}
.muted{color:var(--muted)}.small{font-size:.9rem}
.warn-box{padding:10px 14px;border-left:4px solid var(--amber);background:var(--warn-bg);border-radius:0 6px 6px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:0 0 18px;padding:0}
.tile{padding:14px 16px;background:var(--panel);border-radius:10px}
.tile dt{font-size:.82rem;color:var(--muted)}
.tile dd{margin:0}
.tile .value{font-size:1.6rem;font-weight:650;line-height:1.25}
.tile .unit{font-size:.95rem;font-weight:500;color:var(--muted)}
.tile .change{font-weight:600}
.tile.good .change{color:var(--green)}
.tile .was,.tile .remark{font-size:.82rem;color:var(--muted)}
.scroll{overflow-x:auto;margin:10px 0 16px}
table{border-collapse:collapse;font-size:.92rem;min-width:min(100%,420px)}
table.wide{width:100%}
caption{padding:0 0 6px;text-align:left;color:var(--muted);font-size:.88rem}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;
 overflow-wrap:break-word}
th{color:var(--muted);font-weight:500;font-size:.84rem;border-bottom-color:var(--muted);overflow-wrap:normal}
th.n,td.n{text-align:right}td.n{white-space:nowrap}
table.dense{font-size:.84rem}table.dense th,table.dense td{padding-right:12px}
th:last-child,td:last-child{padding-right:0}
td.good{color:var(--green);font-weight:600}td.bad{color:var(--red);font-weight:600}td.strong{font-weight:600}
td.mu{color:var(--muted)}
svg.swatch{width:.7em;height:.7em;margin-right:.45em}
.facts{display:grid;grid-template-columns:minmax(120px,max-content) 1fr;gap:4px 20px;margin:0 0 14px;font-size:.92rem}
.facts dt{color:var(--muted)}.facts dd{margin:0;overflow-wrap:anywhere}
pre{margin:4px 0 14px;padding:12px 14px;background:var(--panel);border-radius:8px;overflow-x:auto;
 font:.82rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.label{margin:12px 0 2px;font-size:.86rem;color:var(--muted)}
details{margin:6px 0;border:1px solid var(--line);border-radius:8px;padding:0 14px}
details[open]{padding-bottom:8px}
summary{padding:9px 0;cursor:pointer;font-size:.94rem;overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:18px 28px}
figure{margin:0;max-width:620px}
figcaption{margin-top:4px;font-size:.86rem;color:var(--muted)}
svg.chart{display:block;width:100%;height:auto}
svg.bar{display:block;width:100%;min-width:120px;max-width:220px;height:18px}
svg text{fill:var(--ink);font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg .tick,svg .note{fill:var(--muted);font-size:12px}svg .axis-title{fill:var(--muted)}
svg .tag{font-weight:600;paint-order:stroke;stroke:var(--bg);stroke-width:4px;stroke-linejoin:round}
svg .grid{stroke:var(--line)}svg .axis{stroke:var(--muted)}
svg .front{fill:none;stroke:var(--blue);stroke-width:1.6;opacity:.75}
svg .good{fill:var(--blue);fill-opacity:.75}
svg .over{fill:none;stroke:var(--muted);stroke-width:1.3}
svg .crash{fill:none;stroke:var(--s0);stroke-width:1.6}
svg .winner{fill:var(--served);stroke:var(--bg);stroke-width:1.2}
svg .baseline{fill:var(--s1);stroke:var(--bg);stroke-width:1.2}
svg .limit{stroke:var(--s0);stroke-dasharray:5 4}
svg .best{fill:none;stroke:var(--served);stroke-width:2}
svg .pivot{stroke:var(--s7);stroke-width:1.4;stroke-dasharray:4 4}
svg .curve polyline{fill:none;stroke:var(--muted);stroke-width:1.1;opacity:.45}
svg .curve .dot{fill:var(--muted);opacity:.55}svg .curve .hollow{fill:var(--bg);stroke:var(--muted)}
svg .curve.baseline polyline{stroke:var(--s1);stroke-width:2.4;opacity:1}
svg .curve.winner polyline{stroke:var(--served);stroke-width:2.4;opacity:1}
svg .curve.baseline{fill:none;stroke:none}svg .curve.winner{fill:none;stroke:none}
svg .curve.baseline .dot{fill:var(--s1);opacity:1}svg .curve.winner .dot{fill:var(--served);opacity:1}
svg text.tag.baseline,svg text.tag.winner{fill:var(--ink);stroke:var(--bg)}
svg .zero{stroke:var(--muted)}svg .range{stroke-width:3;stroke:var(--muted)}svg .mid{fill:var(--muted)}
svg .up{stroke:var(--served)}svg .mid.up{fill:var(--served)}svg .down{stroke:var(--s0)}svg .mid.down{fill:var(--s0)}
svg .served{fill:var(--served)}
svg .sig0{fill:var(--s0)}svg .sig1{fill:var(--s1)}svg .sig2{fill:var(--s2)}svg .sig3{fill:var(--s3)}
svg .sig4{fill:var(--s4)}svg .sig5{fill:var(--s5)}svg .sig6{fill:var(--s6)}svg .sig7{fill:var(--s7)}
svg .sig8{fill:var(--s8)}
footer{margin-top:44px;padding-top:14px;border-top:1px solid var(--line);color:var(--muted);font-size:.88rem}
@media (max-width:640px){
 main{padding:22px 16px 40px}
 .tiles{grid-template-columns:1fr 1fr;gap:8px}.tile{padding:11px 12px}.tile .value{font-size:1.3rem}
 .opt{display:none}
 table{min-width:0;font-size:.87rem}th,td{padding-right:10px}
 svg.bar{min-width:96px}
 .facts{grid-template-columns:1fr;gap:0}.facts dd{margin-bottom:8px}
 table.stack,table.stack tbody,table.stack tr,table.stack td{display:block;width:100%;min-width:0}
 table.stack caption{display:block}
 table.stack thead{position:absolute;clip-path:inset(50%);height:1px;width:1px;overflow:hidden}
 table.stack tr{padding:8px 0;border-bottom:1px solid var(--line)}
 table.stack td{display:grid;grid-template-columns:8.2rem 1fr;gap:10px;padding:2px 0;border:0;text-align:left;
  white-space:normal;overflow-wrap:anywhere}
 table.stack td::before{content:attr(data-label);color:var(--muted);font-weight:400;font-size:.84rem}
 table.stack td.empty{display:none}
}
@media print{
 :root{--bg:#fff;--ink:#000;--muted:#444;--line:#ccc;--panel:#f4f4f4;--green:#00573c;--red:#8a3300;--blue:#00507d}
 body{font-size:10.5pt}main{max-width:none;padding:0}nav{display:none}
 section{break-inside:auto;margin-top:22px}h2{break-after:avoid}
 figure,.tile,tr{break-inside:avoid}.scroll{overflow:visible}
 .charts{grid-template-columns:1fr 1fr}
 #trials{display:none}
}
"""
