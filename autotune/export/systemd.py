"""A systemd unit. Parameters are environment variables of the unit; /etc/autotune/NAME.env overrides them.

systemd starts no shell: words are quoted by the rules of systemd (systemd.syntax(7), "Quoting"; systemd.service(5),
"Command lines"), `%` doubled everywhere and `$` in commands.
"""

from __future__ import annotations

from autotune.export.deployment import Deployment, Ref, Word, lines
from autotune.utils.text import one_line, slug


def render(deployment: Deployment) -> str:
    name = slug(deployment.study)
    settings = f"/etc/autotune/{name}.env"
    title = one_line(f"inference server of study {deployment.study}, trial {deployment.trial}")
    out = [deployment.comment(), f"# Install: copy to /etc/systemd/system/{name}.service; systemctl daemon-reload; "
           f"systemctl enable --now {name}", f"# NAME=value lines in {settings} replace the values of Environment=.",
           "", "[Unit]", "Description=" + title.replace("%", "%%").rstrip("\\"),
           "Wants=network-online.target", "After=network-online.target", "", "[Service]", "Type=exec"]
    # `$` means nothing in Environment=.
    out += [f'Environment="{_escaped(f"{p.name}={p.default}")}"' for p in deployment.parameters.values()]
    out.append(f"EnvironmentFile={'' if deployment.secrets else '-'}{settings}")
    out += [f"ExecStartPre=/usr/bin/test -n ${{{name}}}" for name in deployment.secrets]
    words: list[list[Word]] = [[("/usr/bin/env",), ("--chdir=", Ref("WORKDIR"))]]
    words += [[(f"{name}=", *value)] for name, value in deployment.env.items() if value != (Ref(name),)]
    words += lines(deployment.argv)
    out.append("ExecStart=" + " \\\n  ".join(" ".join(word(w) for w in line) for line in words))
    out += ["Restart=on-failure", "RestartSec=10", f"TimeoutStopSec={deployment.stop_limit_s}",
            "KillMode=mixed", "LimitNOFILE=1048576", "", "[Install]", "WantedBy=multi-user.target"]
    return "\n".join(out) + "\n"


def word(value: Word) -> str:
    """One word of a command line: literals escaped, references left for systemd, which never splits `${NAME}`."""
    text = "".join(f"${{{part.name}}}" if isinstance(part, Ref) else _escaped(part).replace("$", "$$")
                   for part in value)
    return text if text and all(c.isalnum() or c in "-_./:=,${}+@" for c in text) else f'"{text}"'


def _escaped(text: str) -> str:
    known = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return "".join(known.get(c) or (c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode())) for c in text)
