"""Whether the workers speak TLS with one another, and whether what it needs is in order."""

from __future__ import annotations

from tfdist.cluster.net.tls import Tls
from tfdist.errors import TlsError
from tfdist.launch.commands.doctor.section import Question, Section
from tfdist.options import Options

_NAME = "between workers"


def check(question: Question) -> Section:
    """Reads the certificate, the key and the CA, and tries them with one another."""
    try:
        tls = Tls.load(Options.from_environment(dict(question.environment)))
    except TlsError as error:
        return Section([(_NAME, "on, and it cannot work")], [str(error)])
    except ValueError:  # `settings` says which
        return Section([(_NAME, "a setting is wrong")])
    if tls is None:
        return Section([(_NAME, "off")])
    return Section([(_NAME, "on"), ("certificate", f"{tls.subject}, until {tls.expires}")])
