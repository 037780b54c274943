"""``python -m spatially``, which launchers such as torchrun need."""

from spatially.cli import main

if __name__ == "__main__":
    main()
