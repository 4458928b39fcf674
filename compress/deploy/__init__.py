"""Where a bundle goes: the folders that serving tools read, made from nothing but the bundle."""
