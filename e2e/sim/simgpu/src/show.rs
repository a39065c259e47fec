//! Formats the machine's state as tables and as JSON.

use std::fmt::Write;

use anyhow::Result;
use serde_json::{Value, json};
use sim_machine::{FaultEffect, Machine, Process, State, builtin_models};

/// Formats the whole state as JSON. Lists only processes that still exist, with their PIDs in the
/// caller's PID namespace.
pub(crate) fn format_machine_json(machine: &Machine) -> Result<String> {
    let mut state = State::clone(&*machine.snapshot()?);
    state.processes = machine.processes()?;
    let mut value = serde_json::to_value(&state)?;
    value["processes"] = state.processes.iter().map(|p| process_json(machine, p)).collect::<Result<_>>()?;
    Ok(serde_json::to_string_pretty(&value)?)
}

fn process_json(machine: &Machine, process: &Process) -> Result<Value> {
    let mut value = serde_json::to_value(process)?;
    value["visiblePid"] = json!(machine.visible_pid(process));
    Ok(value)
}

/// Formats the processes as a table or as JSON.
pub(crate) fn format_processes(machine: &Machine, as_json: bool) -> Result<String> {
    let processes = machine.processes()?;
    if as_json {
        let values: Vec<Value> = processes.iter().map(|p| process_json(machine, p)).collect::<Result<_>>()?;
        return Ok(serde_json::to_string_pretty(&values)? + "\n");
    }
    let mut out = format!("{:<9} {:<10} {:>8}  {:<41} NAME\n", "PID", "KIND", "MIB", "DEVICE");
    for p in &processes {
        let pid = machine.visible_pid(p).map_or_else(|| format!("({})", p.pid.pid), |pid| pid.to_string());
        writeln!(out, "{pid:<9} {:<10} {:>8}  {:<41} {}", format!("{:?}", p.kind), p.used >> 20, p.device, p.name)?;
    }
    Ok(out)
}

/// Formats the machine, its GPUs, their processes and their faults as a table.
pub(crate) fn format_machine_table(machine: &Machine) -> Result<String> {
    let (state, processes) = (machine.snapshot()?, machine.processes()?);
    let mut out = String::new();
    let driver = if state.driver.present { state.driver.version.as_str() } else { "not loaded" };
    writeln!(
        out,
        "machine {}  driver {driver}  CUDA {}  boot {}",
        state.machine,
        format_cuda_version(state.driver.cuda),
        state.boot
    )?;
    writeln!(out, "{:<4} {:<41} {:<22} {:>4} {:>15}  STATE", "GPU", "UUID", "MODEL", "SMS", "MIB USED/TOTAL")?;
    for gpu in &state.gpus {
        let model = state.model(gpu)?;
        let used = state.used_bytes(&processes, &gpu.uuid) >> 20;
        let mut notes = vec![format!("{:?}", gpu.compute_mode)];
        match (gpu.mig, gpu.mig_pending) {
            (true, true) => notes.push("MIG".to_owned()),
            (true, false) => notes.push("MIG, pending off".to_owned()),
            (false, true) => notes.push("pending MIG".to_owned()),
            (false, false) => {}
        }
        if gpu.lost {
            notes.push("LOST".to_owned());
        }
        if gpu.ecc != [0, 0] {
            notes.push(format!("ECC {} corrected, {} uncorrected", gpu.ecc[0], gpu.ecc[1]));
        }
        for (is, note) in [
            (gpu.remap_pending, "remap pending"),
            (gpu.remap_failed, "remap failed"),
            (gpu.recovery > 0, "the driver requests a recovery action"),
        ] {
            if is {
                notes.push(note.to_owned());
            }
        }
        let memory = format!("{used}/{}", model.cuda_memory_mib);
        let notes = notes.join(", ");
        writeln!(out, "{:<4} {:<41} {:<22} {:>4} {memory:>15}  {notes}", gpu.index, gpu.uuid, model.name, model.sms)?;
        for gi in &gpu.instances {
            let name = model.gpu_profile(gi.profile).map_or("?", |p| p.name.as_str());
            let place = format!("GI {} {name} at {}:{}", gi.id, gi.placement.start, gi.placement.size);
            if gi.compute.is_empty() {
                writeln!(out, "     {place}, no compute instance")?;
            }
            for ci in &gi.compute {
                let sms = state.device(&ci.uuid).map_or(0, |d| d.sms());
                writeln!(out, "     {:<41} {place}, CI {}, {sms} SMs", ci.uuid, ci.id)?;
            }
        }
    }
    for fault in &state.faults {
        let effect = match fault.effect {
            FaultEffect::Code(code) => format!("returns {code}"),
            FaultEffect::Hang(None) => "hangs".to_owned(),
            FaultEffect::Hang(Some(seconds)) => format!("hangs for {seconds} s"),
        };
        let place = fault.gpu.as_ref().map_or_else(String::new, |g| format!(" on {g}"));
        let left = fault.remaining.map_or_else(String::new, |n| format!(", {n} more"));
        writeln!(out, "fault {}: {}{place} {effect}{left}", fault.id, fault.call)?;
    }
    if !processes.is_empty() {
        out.push_str(&format_processes(machine, false)?);
    }
    Ok(out)
}

fn format_cuda_version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Formats a table of the models that a description of a machine can name.
pub(crate) fn format_models() -> Result<String> {
    let mut out = String::new();
    for model in builtin_models() {
        let names = model.aliases.join(", ");
        writeln!(out, "{names:<16} {:<22} {:>3} SMs {:>6} MiB", model.name, model.sms, model.memory_mib)?;
        for p in &model.gpu_profiles {
            let starts: Vec<String> = p.starts.iter().map(u32::to_string).collect();
            let place = format!("at {}:{}", starts.join(","), p.size);
            writeln!(out, "    {:<12} id {:>2} {:>3} SMs {:>6} MiB {place}", p.name, p.id, p.sms, p.memory_mib)?;
        }
    }
    Ok(out)
}
