//! Options from more than one place. The command line is the one description of them: an option `--pool-tokens` is
//! `KVFERRY_POOL_TOKENS` in the environment and `pool-tokens` in a file. The command line counts before the environment,
//! the environment before the file, the file before what is built in.

use std::{ffi::OsString, path::Path};

use clap::{ArgMatches, Command, parser::ValueSource};
use toml::{Table, Value};

use crate::failure::Failure;

/// Keys that a file cannot have: they say nothing about what is to run.
const NOT_IN_FILES: [&str; 2] = ["help", "json"];
/// How alike two names are at least for one to be meant by the other.
const ALIKE: f64 = 0.7;

/// Gives each option of a command its variable in the environment.
pub(crate) fn from_environment(command: Command) -> Command {
    command.mut_args(|arg| match arg.get_long() {
        Some(long) if long != "help" => {
            let name = format!("KVFERRY_{}", long.replace('-', "_").to_uppercase());
            arg.env(name).hide_env(true)
        }
        _ => arg,
    })
}

/// What a file says, as more arguments of `command`, where neither its command line nor the environment says it.
pub(crate) fn from_file(
    path: &Path,
    command: &Command,
    matches: &ArgMatches,
) -> Result<Vec<OsString>, Failure> {
    let within = |text: String| Failure::caller(format!("{}: {text}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| within(format!("cannot be read: {e}")))?;
    let table: Table = text.parse().map_err(|e: toml::de::Error| within(e.to_string()))?;
    let mut args = Vec::new();
    for (key, value) in &table {
        let option = command.get_arguments().find(|arg| arg.get_long() == Some(key));
        let Some(option) = option.filter(|_| !NOT_IN_FILES.contains(&key.as_str())) else {
            return Err(within(unknown(key, command)));
        };
        let source = matches.value_source(option.get_id().as_str());
        if !matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
            let takes = option.get_action().takes_values();
            args.extend(arguments(key, value, takes).map_err(within)?);
        }
    }
    Ok(args)
}

fn arguments(key: &str, value: &Value, takes_value: bool) -> Result<Vec<OsString>, String> {
    let with = |text: &dyn std::fmt::Display| Ok(vec![format!("--{key}={text}").into()]);
    match value {
        Value::Boolean(true) if !takes_value => Ok(vec![format!("--{key}").into()]),
        Value::Boolean(false) if !takes_value => Ok(Vec::new()),
        _ if !takes_value => Err(format!("`{key}` is true or false, not {value}")),
        Value::String(text) => with(text),
        Value::Integer(number) => with(number),
        Value::Float(number) => with(number),
        Value::Array(values) => {
            let each = values.iter().map(|value| match value {
                Value::Array(_) => Err(format!("`{key}` is a list of values, not of lists")),
                value => arguments(key, value, takes_value),
            });
            each.collect::<Result<Vec<_>, _>>().map(|lists| lists.concat())
        }
        _ => {
            Err(format!("`{key}` cannot be {value}; write a text, a number, true, false, or a list of them"))
        }
    }
}

fn unknown(key: &str, command: &Command) -> String {
    let names = || {
        let longs = command.get_arguments().filter_map(|arg| arg.get_long());
        longs.filter(|long| !NOT_IN_FILES.contains(long))
    };
    let alike = |name: &str| strsim::jaro_winkler(key, name);
    let nearest = names().max_by(|a, b| alike(a).total_cmp(&alike(b))).filter(|name| alike(name) >= ALIKE);
    match nearest {
        Some(name) => format!("there is no option `{key}`; did you mean `{name}`?"),
        None => format!("there is no option `{key}`; there are: {}", names().collect::<Vec<_>>().join(", ")),
    }
}
