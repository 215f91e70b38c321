"""Prints pip's settings as uv's, as lines of shell: `eval "$(python requirements/pip_settings.py)"`.

uv does not read pip's configuration. Where it names an index, a folder of wheels, a proxy or certificates, uv
is to use these too. What the environment already sets for uv stays. Left out: constraints, since the locks
name one version of each package.
"""

import ast
import os
import shlex
import ssl
import subprocess
import sys
from collections.abc import Mapping

SECTIONS = ("global", "install", ":env:")  # a later one goes before an earlier one
OFF = ("", "0", "false", "no", "off")


def configured() -> dict[str, str]:
    """Returns the options of `pip install` that files or PIP_* variables set; values of several words are as
    pip prints them."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    options: dict[tuple[str, str], str] = {}
    for line in listed.splitlines():
        key, equals, value = line.partition("=")
        section, _, option = key.partition(".")
        if equals:
            options[section, option] = ast.literal_eval(value)
    merged: dict[str, str] = {}
    for chosen in SECTIONS:
        merged |= {option: value for (section, option), value in options.items() if section == chosen}
    return merged


def system_has_certificates() -> bool:
    """Returns whether this machine has certificates of its own. UV_SYSTEM_CERTS makes uv fail where there are
    none."""
    paths = ssl.get_default_verify_paths()
    return bool(paths.cafile or (paths.capath and os.listdir(paths.capath)))


def for_uv(pip: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns `pip`'s settings as variables of uv, without those that `environment` already sets."""
    found: dict[str, str] = {}
    if "index-url" in pip and "UV_INDEX_URL" not in environment:
        found["UV_DEFAULT_INDEX"] = pip["index-url"]
    if "extra-index-url" in pip and not environment.keys() & {"UV_INDEX", "UV_EXTRA_INDEX_URL"}:
        found["UV_INDEX"] = " ".join(pip["extra-index-url"].split())
        # As pip does: the version that is asked for counts, from whichever index; the locks' hashes say which
        # file it is.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if "find-links" in pip:
        found["UV_FIND_LINKS"] = ",".join(pip["find-links"].split())
    if "trusted-host" in pip:
        found["UV_INSECURE_HOST"] = " ".join(pip["trusted-host"].split())
    if "proxy" in pip:
        found["ALL_PROXY"] = pip["proxy"]
    if pip.get("no-index", "").lower() not in OFF:
        found["UV_OFFLINE"] = "1"
    found["UV_HTTP_TIMEOUT"] = pip.get("timeout", pip.get("default-timeout", "60"))
    bundle = pip.get("cert") or environment.get("REQUESTS_CA_BUNDLE") or environment.get("CURL_CA_BUNDLE")
    if bundle:
        found["SSL_CERT_FILE"] = bundle
    elif system_has_certificates():
        found["UV_SYSTEM_CERTS"] = "1"
    return {name: value for name, value in found.items() if name not in environment}


if __name__ == "__main__":
    for name, value in for_uv(configured(), os.environ).items():
        print(f"export {name}={shlex.quote(value)}")
