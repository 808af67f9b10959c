"""`python -m gdscache` is the command `gdscache`."""

from gdscache.commands.main import main

if __name__ == "__main__":
    main()
