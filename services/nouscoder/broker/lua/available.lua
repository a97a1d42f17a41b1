-- Returns what could be leased now: see `available` in common.lua. ARGV: rules.
return available()
