//! Generates the reference page of the command line from the command definitions.
use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use clap::{Arg, Args as _, Command, Subcommand as _};

use crate::generated_parts::{fill_generated_parts, format_table};
use crate::wrapping::wrap;

/// Returns all documented programs with their commands, without the log options of servers. The
/// hand-written part of the page describes these options.
fn documented_programs() -> Vec<Command> {
    // Set the name and purpose last, because the arguments of a server may also set them.
    let server = |name: &'static str, about: &'static str, arguments: fn(Command) -> Command| {
        arguments(Command::new(name)).name(name).about(about).long_about(None::<&str>)
    };
    let operator = "Plan how GPUs are shared, and write the plan to each node's GpuNode";
    let agent = "Serve this node's GPUs to the kubelet, and apply its GpuNode";
    let host = "Run this node's MPS daemons and enforce the limits of their clients";
    vec![
        cleave_cli::Command::augment_subcommands(Command::new("cleave")).subcommand(server(
            "operator",
            operator,
            cleave_operator::OperatorArgs::augment_args,
        )),
        server("cleave-agent", agent, cleave_agent::AgentArgs::augment_args),
        server("cleave-mps-host", host, cleave_gpu::mps::host::HostArgs::augment_args),
    ]
}

/// Returns the page with the generated table of commands, and a generated part for each command.
pub(crate) fn render_page(page: &str) -> Result<String> {
    let mut commands = Vec::new();
    for mut program in documented_programs() {
        program.build();
        collect_commands(&program, program.get_name(), &mut commands);
    }
    let mut required: Vec<String> = commands.iter().map(|(name, _)| name.clone()).collect();
    required.push("commands".to_owned());
    fill_generated_parts(page, &required, |name| {
        if name == "commands" {
            return Ok(summary_table(&commands));
        }
        let (_, command) = commands.iter().find(|(command, _)| command == name).context("there is no such command")?;
        Ok(describe_command(name, command))
    })
}

/// Adds each runnable command to `commands`, with its full name. A command is runnable if it has no
/// documented subcommands or has positional arguments.
fn collect_commands(command: &Command, name: &str, commands: &mut Vec<(String, Command)>) {
    let below: Vec<&Command> =
        command.get_subcommands().filter(|below| below.get_name() != "help" && !is_internal(below)).collect();
    if below.is_empty() || command.get_positionals().next().is_some() {
        commands.push((name.to_owned(), command.clone()));
    }
    for below in below {
        collect_commands(below, &format!("{name} {}", below.get_name()), commands);
    }
}

/// Returns whether only the program itself uses a command, so that the page omits the command.
fn is_internal(command: &Command) -> bool {
    command.is_hide_set()
}

/// Returns a table with one row for each command.
fn summary_table(commands: &[(String, Command)]) -> String {
    let row = |(name, command): &(String, Command)| {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        vec![format!("[`{name}`](#{})", name.replace(' ', "-")), about.trim_end_matches('.').to_owned()]
    };
    format_table(&["command", "purpose"], &commands.iter().map(row).collect::<Vec<_>>())
}

/// Describes a command: its purpose, its usage and its arguments.
fn describe_command(name: &str, command: &Command) -> String {
    let about = command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string).unwrap_or_default();
    let mut out: String = about.split("\n\n").map(|paragraph| wrap(&add_full_stop(paragraph), "", "") + "\n").collect();
    let arguments: Vec<&Arg> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version"))
        .collect();
    let positionals = command.get_positionals().map(|arg| {
        let value = value_name(arg);
        if arg.is_required_set() { format!(" {value}") } else { format!(" [{value}]") }
    });
    let options = if arguments.iter().any(|arg| !arg.is_positional()) { " [OPTION...]" } else { "" };
    let _ = writeln!(out, "Usage: `{name}{options}{}`", positionals.collect::<String>());
    if !arguments.is_empty() {
        let rows: Vec<Vec<String>> =
            arguments.iter().map(|arg| vec![format!("`{}`", argument_syntax(arg)), describe_argument(arg)]).collect();
        out.push('\n');
        out.push_str(&format_table(&["argument", "meaning"], &rows));
    }
    out
}

/// Returns the name of an argument's value, with `...` if the argument takes several values.
fn value_name(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    let name = names.first().map_or_else(|| arg.get_id().as_str().to_uppercase(), ToString::to_string);
    let many = arg.get_num_args().is_some_and(|count| count.max_values() > 1);
    if many { format!("{name}...") } else { name }
}

/// Returns the syntax of an argument.
fn argument_syntax(arg: &Arg) -> String {
    if arg.is_positional() {
        return value_name(arg);
    }
    let short = arg.get_short().map(|short| format!("-{short}, ")).unwrap_or_default();
    let long = arg.get_long().map(|long| format!("--{long}")).unwrap_or_default();
    let value = if arg.get_action().takes_values() { format!(" {}", value_name(arg)) } else { String::new() };
    format!("{short}{long}{value}")
}

/// Joins a text into one line that ends with a full stop or a colon.
fn add_full_stop(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if text.is_empty() || text.ends_with(['.', ':']) { text } else { text + "." }
}

/// Describes an argument: its help, choices, default and environment variable.
fn describe_argument(arg: &Arg) -> String {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    // Some help texts state a default in brackets, as clap does.
    let help = help.trim_end_matches(']').replace(" [default: ", ". Default: ");
    let mut out = add_full_stop(&help).replace('<', "\\<");
    let quoted = |names: Vec<String>| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let choices = arg.get_possible_values();
    let takes_values = arg.get_action().takes_values();
    if takes_values && !choices.is_empty() {
        let names = choices.iter().filter(|choice| !choice.is_hide_set()).map(|choice| choice.get_name().to_owned());
        let _ = write!(out, " One of {}.", quoted(names.collect()));
    }
    let defaults: Vec<String> = arg
        .get_default_values()
        .iter()
        .map(|value| value.to_string_lossy().into_owned())
        .filter(|value| !value.is_empty())
        .collect();
    if takes_values && !defaults.is_empty() {
        let _ = write!(out, " Default: {}.", quoted(defaults));
    }
    if let Some(variable) = arg.get_env() {
        let _ = write!(out, " Environment: `{}`.", variable.to_string_lossy());
    }
    out.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_of_an_argument_has_its_default_and_choices() {
        let arg = Arg::new("output").short('o').long("output").help("Form").value_name("FORM");
        let arg = arg.value_parser(["text", "json"]).default_value("text");
        let mut command = Command::new("a").about("Do it.").arg(arg).arg(Arg::new("node").required(true));
        command.build();
        let text = describe_command("a", &command);
        for part in
            ["Usage: `a [OPTION...] NODE`", "| `-o, --output FORM` | Form. One of `text`, `json`. Default: `text`. |"]
        {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn each_program_has_commands_with_a_purpose() {
        for mut program in documented_programs() {
            program.build();
            let mut commands = Vec::new();
            collect_commands(&program, program.get_name(), &mut commands);
            assert!(!commands.is_empty());
            for (name, command) in commands {
                assert!(command.get_about().is_some(), "{name} has no purpose");
            }
        }
    }
}
