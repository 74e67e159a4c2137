"""Whether this container is well: what its process says at /health, where it serves that; asked by the image."""

import sys
import urllib.error
import urllib.request

try:
    urllib.request.urlopen("http://127.0.0.1:9100/health", timeout=5)
except urllib.error.HTTPError:
    sys.exit(1)  # it answers, and says no
except OSError as error:
    # Nobody listens: a command without --metrics 0.0.0.0:9100, which has nothing to say.
    sys.exit(0 if isinstance(getattr(error, "reason", error), ConnectionRefusedError) else 1)
