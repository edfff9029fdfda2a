# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_recurrence` is `hf-recurrence`; launchers that want a module take it by this name."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.exit(main())
