"""Run as `python -m cudnn_sdpa`."""

from cudnn_sdpa.cli import app

if __name__ == "__main__":
    app(prog_name="python -m cudnn_sdpa")
