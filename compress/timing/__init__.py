"""The one clock of the build: graphs timed on the runtime that will run them, and what this machine measured."""
