{% extends "modules/modulefile.tcl" %}
{# A site's own modules of CUDA, PyTorch and Python (`modules:` of an external): Spack ignores them #}
{% set direct = spec.dependencies(deptype=("link", "run")) %}
{% set autoload = autoload + (direct | map(attribute="external_modules") | select | sum(start=[]) | unique | list) %}
{# Restored by unload, not dropped: the user or another module may have set them #}
{% set restored = environment_modifications | selectattr(0, "equalto", "SetEnv") | list %}
{% set environment_modifications = environment_modifications | rejectattr(0, "equalto", "SetEnv") | list %}
{% set python = spec["python"] %}
{% set torch = spec["py-torch"] %}
{% block header %}
module-whatis {{ '{' }}{{ short_description }}{{ '}' }}

proc ModulesHelp { } {
    puts stderr {{ '{' }}
{% include "modules/py-deep-ep.txt" %}
{{ '}' }}
}
{% endblock %}
{% block environment %}
{% if not python.external_modules and python.prefix not in ("/", "/usr", "/usr/local") %}
# The Python that has PyTorch
prepend-path PATH {{ '{' }}{{ python.prefix }}/bin{{ '}' }}
{% endif %}
{% if not torch.external_modules and torch.prefix != python.prefix %}
prepend-path PYTHONPATH {{ '{' }}{{ torch.prefix }}/{{ python.package.platlib }}{{ '}' }}
{% endif %}
{{ super() }}
# Sets a variable; unload gives back the value it had. pushenv does that since Environment Modules
# 5.1, but not in Lmod's Tcl: there it takes the new value for the old one, unless it is told
proc set-restored {name value} {
    set saved DEEP_EP_MODULE_SAVED_$name
    set lmod [info exists ::env(LMOD_VERSION_MAJOR)]
    if {[module-info mode load]} {
        if {[info exists ::env($name)]} {
            set old $::env($name)
            setenv $saved $old
            if {$lmod} {
                pushenv $name $old
                pushenv $name $value
                return
            }
        }
    } elseif {[info exists ::env($saved)]} {
        # Unload does the opposite of each command
        set old $::env($saved)
        setenv $saved $old
        if {$lmod} {
            pushenv $name $value
        } else {
            unsetenv $name $old
        }
        return
    }
    setenv $name $value
}
{% for _, cmd in restored %}
set-restored {{ cmd.name }} {{ '{' }}{{ cmd.value }}{{ '}' }}
{% endfor %}
{% endblock %}
{% block footer %}
# A default that the user's own value beats. The second variable tells unload whose value it is
if {[module-info mode remove] || [module-info mode unload]} {
    if {[info exists ::env(DEEP_EP_MODULE_CACHE_DIR)]} {
        set default $::env(DEEP_EP_MODULE_CACHE_DIR)
        setenv DEEP_EP_MODULE_CACHE_DIR $default
        if {[info exists ::env(HYBRID_EP_CACHE_DIR)] && $::env(HYBRID_EP_CACHE_DIR) eq $default} {
            setenv HYBRID_EP_CACHE_DIR $default
        }
    }
} elseif {[module-info mode load] && ![info exists ::env(HYBRID_EP_CACHE_DIR)]} {
    # Without 2>, Tcl wants to write into TMPDIR
    if {[catch {exec /bin/sh -c {
{% include "modules/cache-dir.sh" %}
} 2>/dev/null} default]} {
        set default ""
    }
    if {$default ne ""} {
        setenv HYBRID_EP_CACHE_DIR $default
        setenv DEEP_EP_MODULE_CACHE_DIR $default
    }
}

if {[module-info mode load] && [info exists ::env(LD_LIBRARY_PATH)]} {
    foreach dir [split $::env(LD_LIBRARY_PATH) :] {
        if {[file exists $dir/libnvshmem_host.so.3] && [string first {{ '{' }}{{ torch.prefix }}/{{ '}' }} $dir] != 0} {
            puts stderr "Warning: LD_LIBRARY_PATH has another NVSHMEM, which PyTorch may load first: $dir"
        }
    }
}
{% endblock %}
