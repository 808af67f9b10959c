"""`python -m gdscache` is the command `gdscache`."""

from gdscache.exits import main

if __name__ == "__main__":
    main()
