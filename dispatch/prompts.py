"""The prompts of the default matrix: one each of prose, code, a known function to complete, and heavy repetition."""

PROMPTS: dict[str, str] = {
    "prose": "An exception is raised when",
    "code": """\
class Reader:
    def __init__(self, fp):
        self.fp = fp

    def read(self, size=-1):
        return""",
    "known-function": '''\
def exists(path):
    """Test whether a path exists."""
    try:
        os.stat(path)
    except''',
    "repetition": r"""
    '\x00'     #  0x00 -> NULL
    '\x01'     #  0x01 -> START OF HEADING
    '\x02'     #  0x02 -> START OF TEXT
    '\x03'""".removeprefix("\n"),
}
"""By name; the names are in test ids, and each text is the head of its snapshots."""
