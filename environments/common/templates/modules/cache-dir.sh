{# What both module files run with sh as they are loaded: prints the cache directory to use. #}
{# Not below another's folder in /tmp: DeepEP runs what it finds there. No dir, no output. #}
exec 2>/dev/null
umask 077
dir=${XDG_CACHE_HOME:-${HOME:-/dev/null}/.cache}/deep-ep
if ! mkdir -p "$dir" || ! test -w "$dir"; then
  dir=${TMPDIR:-/tmp}/deep-ep-$(id -un)
  mkdir "$dir"
  test -O "$dir" && test -w "$dir" && ! test -L "$dir" || dir=
fi
printf %s "$dir"
