{% extends "modules/modulefile.lua" %}
{# A site's own modules of CUDA, PyTorch and Python (`modules:` of an external): Spack ignores them #}
{% set direct = spec.dependencies(deptype=("link", "run")) %}
{% set autoload = autoload + (direct | map(attribute="external_modules") | select | sum(start=[]) | unique | list) %}
{# Restored by unload, not dropped: the user or another module may have set them #}
{% set restored = environment_modifications | selectattr(0, "equalto", "SetEnv") | list %}
{% set environment_modifications = environment_modifications | rejectattr(0, "equalto", "SetEnv") | list %}
{% set python = spec["python"] %}
{% set torch = spec["py-torch"] %}
{% block header %}
whatis([[Name : {{ spec.name }}]])
whatis([[Version : {{ spec.version }}]])
whatis([[Short description : {{ short_description }}]])
whatis([[URL : {{ spec.package.homepage }}]])

help([[
{% include "modules/py-deep-ep.txt" %}
]])
{% endblock %}
{% block autoloads %}
-- What these are now, before a module of the site's may set them too
local before = {}
{% for _, cmd in restored %}
before["{{ cmd.name }}"] = os.getenv("{{ cmd.name }}")
{% endfor %}
{{ super() }}
{% endblock %}
{% block environment %}
{% if not python.external_modules and python.prefix not in ("/", "/usr", "/usr/local") %}
-- The Python that has PyTorch
prepend_path("PATH", "{{ python.prefix }}/bin")
{% endif %}
{% if not torch.external_modules and torch.prefix != python.prefix %}
prepend_path("PYTHONPATH", "{{ torch.prefix }}/{{ python.package.platlib }}")
{% endif %}
{{ super() }}
-- Sets a variable; unload gives back the value it had before
local function set_restored(name, value)
  local saved = "DEEP_EP_MODULE_SAVED_" .. name
  local old = before[name]
  if mode() == "unload" then
    old = os.getenv(saved)
  elseif mode() == "load" and old then
    pushenv(name, old)
  end
  if old then
    setenv(saved, old)
    pushenv(name, value)
  else
    setenv(name, value)
  end
end
{% for _, cmd in restored %}
set_restored("{{ cmd.name }}", "{{ cmd.value }}")
{% endfor %}
{% endblock %}
{% block footer %}
-- A default that the user's own value beats. The second variable tells unload whose value it is
local cache, default = os.getenv("HYBRID_EP_CACHE_DIR"), os.getenv("DEEP_EP_MODULE_CACHE_DIR")
if mode() == "unload" then
  if default then
    setenv("DEEP_EP_MODULE_CACHE_DIR", default)
    if cache == default then
      setenv("HYBRID_EP_CACHE_DIR", default)
    end
  end
elseif mode() == "load" and not cache then
  default = capture([[
{% include "modules/cache-dir.sh" %}
]])
  if default ~= "" then
    setenv("HYBRID_EP_CACHE_DIR", default)
    setenv("DEEP_EP_MODULE_CACHE_DIR", default)
  end
end

if mode() == "load" then
  for dir in string.gmatch(os.getenv("LD_LIBRARY_PATH") or "", "[^:]+") do
    if isFile(pathJoin(dir, "libnvshmem_host.so.3")) and string.find(dir, "{{ torch.prefix }}/", 1, true) ~= 1 then
      -- No LmodWarning: it makes the load fail for `set -e` and `||`
      LmodMessage("Warning: LD_LIBRARY_PATH has another NVSHMEM, which PyTorch may load first: " .. dir)
    end
  end
end
{% endblock %}
