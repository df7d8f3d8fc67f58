"""Cases that do not hold and why: strict xfails, so that a mended one is noticed."""

KNOWN_OPEN: dict[str, str] = {}
