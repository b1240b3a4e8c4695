"""``lightning-spot token``: makes a token that holds for some runs, for some time."""

from __future__ import annotations

import argparse
import time

from lightning_spot.cli.arguments import takes_time
from lightning_spot.config import read_environment
from lightning_spot.errors import SettingsError
from lightning_spot.protocol.credentials import Rights, Scope


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``token``."""
    prefix = "runs that it holds for: PREFIX, and names that go on after it with one of . _ = + -"
    parser.add_argument("--run", required=True, metavar="PREFIX", help=prefix)
    rights = "read: list runs and read snapshots; write: also open runs and upload"
    parser.add_argument("--rights", required=True, choices=[each.value for each in Rights], help=rights)
    parser.add_argument("--expires", default=7 * 86400.0, help="how long it holds (default: 7d)", **takes_time(1))


def token(arguments: argparse.Namespace) -> int:
    """Print a token, signed by the secret of the environment.

    Raises:
        SettingsError: if there is no secret, or a value cannot be used.
    """
    secret = read_environment().token
    if secret is None:
        raise SettingsError(
            "there is no secret to sign with: set LIGHTNING_SPOT_TOKEN_FILE (or LIGHTNING_SPOT_TOKEN) to that of the"
            " server"
        )
    expires_unix_s = int(time.time() + arguments.expires)
    scope = Scope(prefix=arguments.run, rights=Rights(arguments.rights), expires_unix_s=expires_unix_s)
    print(scope.token(secret))
    return 0
