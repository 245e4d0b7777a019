"""interrupted.py COMMAND...: runs it, presses Ctrl-C once it has shown something, and ends with
its exit code.
"""

import signal
import subprocess
import sys

if __name__ == "__main__":
    # A shell that runs the tests in its background has them ignore it, and so would the command.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        print(shown.stdout.readline(), end="")
        shown.send_signal(signal.SIGINT)
        print(shown.stdout.read(), end="")
    sys.exit(shown.returncode)
