"""Whether the workers use TLS, and whether its files are valid."""

from __future__ import annotations

from tfdist._src.cluster.net.tls import Tls
from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.options import Options
from tfdist.errors import TlsError

_NAME = "between workers"


def check(context: Context) -> Section:
    """Loads the certificate, the key and the CA, and checks that they match."""
    try:
        tls = Tls.load(Options.from_environment(dict(context.environment)))
    except TlsError as error:
        return Section([(_NAME, "on, but invalid")], [str(error)])
    except ValueError:  # `settings` reports which
        return Section([(_NAME, "a setting is invalid")])
    if tls is None:
        return Section([(_NAME, "off")])
    return Section([(_NAME, "on"), ("certificate", f"{tls.subject}, until {tls.expires}")])
