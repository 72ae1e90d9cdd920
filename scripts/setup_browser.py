"""Find Chromium for the browser tests, or install Debian's package of it. Standard library only.

    python3 scripts/setup_browser.py            # installs the system package when there is no Chromium; needs root and apt-get
    python3 scripts/setup_browser.py --find     # only prints where it is

Playwright drives the Chromium that it is told of, so its own download of browsers, which clusters and CI machines often cannot reach, is
not used. This script alone installs something outside of ``.venv``: ``make setup-browser`` and ``.ci/run`` call it, nothing else does.

Exit status: 0 Chromium is there; 2 the installation failed; 3 it cannot be installed here (not Debian or Ubuntu, or not root).

Environment:
    RLKIT_CHROMIUM  the Chromium or Chrome to use.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PACKAGES = ("chromium", "fonts-dejavu-core")  # without a font every letter of a screenshot is a box
BY_HAND = "On Debian and Ubuntu: sudo apt-get install --no-install-recommends " + " ".join(PACKAGES)
OVERRIDE = "RLKIT_CHROMIUM names one that lies elsewhere."


class CannotInstall(Exception):
    """There is no Chromium, and this machine or user cannot get one; the message says what to do."""


class InstallFailed(Exception):
    """apt-get was called and failed; holds its last lines."""


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def answers(path: str) -> str | None:
    """What ``path --version`` says, or None when it does not run (Ubuntu's ``chromium-browser`` may be a note that a snap is missing)."""
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() if told.returncode == 0 and told.stdout.strip() else None


def find_chromium() -> str | None:
    """The path of a Chromium that starts, or None.

    Raises:
        CannotInstall: RLKIT_CHROMIUM names something that does not start.
    """
    named = os.environ.get("RLKIT_CHROMIUM")
    if named:
        path = shutil.which(named)
        if path is None or answers(path) is None:
            raise CannotInstall(f"RLKIT_CHROMIUM is {named!r}, which does not start as a browser. Unset it, or name another.")
        return path
    found = (shutil.which(name) for name in NAMES)
    return next((path for path in found if path is not None and answers(path) is not None), None)


def install() -> None:
    """Debian's package.

    Raises:
        CannotInstall: no apt-get, or not root.
        InstallFailed: apt-get failed.
    """
    apt = shutil.which("apt-get")
    if apt is None:
        raise CannotInstall(f"there is no Chromium here, and no apt-get to install it with. Install it by hand; {OVERRIDE}")
    if os.geteuid() != 0:
        raise CannotInstall(f"there is no Chromium here, and only root may install it. {BY_HAND}. {OVERRIDE}")
    say(f"installing {' and '.join(PACKAGES)} with apt-get")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run([apt, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            tail = "\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()[-15:])
            raise InstallFailed(f"apt-get {arguments[0]} failed:\n{tail}\n  {BY_HAND}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Find Chromium for the browser tests, or install Debian's package of it.")
    parser.add_argument("--find", action="store_true", help="install nothing; print the path")
    args = parser.parse_args(argv)
    try:
        path = find_chromium()
        if path is None and args.find:
            raise CannotInstall(f"there is no Chromium here. make setup-browser installs it. {OVERRIDE}")
        if path is None:
            install()
            path = find_chromium()
            if path is None:
                raise InstallFailed(f"apt-get succeeded, but none of {', '.join(NAMES)} starts.")
    except CannotInstall as why:
        print(f"setup: {why}", file=sys.stderr)
        return 3
    except InstallFailed as why:
        print(f"setup: {why}", file=sys.stderr)
        return 2
    if args.find:
        print(path)
    else:
        say(f"{path}: {answers(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
