//! An administrator's commands, carried out.

use std::fs;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::Daemon;
use crate::command::{Command, HELP};
use crate::handshake;
use crate::limits::Settings;
use crate::seqpacket::Connection;
use crate::wire::{self, ToServer};

/// The answer to a privileged command that came over `control`. That it is refused was measured, the words were not.
const REFUSED: &str = "Insufficient privilege to execute the command\n";
/// How long a server that was told to end may take before it is killed.
const END: Duration = Duration::from_secs(5);
/// How often a waiting command looks again.
const WAITING: Duration = Duration::from_millis(50);

impl Daemon {
    /// Answers an administrator until it has no more commands.
    pub(super) fn administrator(self: &Arc<Self>, connection: &Connection, privileged: bool) {
        loop {
            let line = match handshake::next_command(connection) {
                Ok(Some(line)) => line,
                Ok(None) => return,
                Err(_) => {
                    self.log("malformed command");
                    return;
                }
            };
            self.log(&format!("Cmd:{line}"));
            let command = Command::parse(&line);
            let text = match &command {
                Err(mistake) => format!("{mistake}\n"),
                Ok(command) if command.is_privileged() && !privileged => REFUSED.to_owned(),
                Ok(command) => match self.injected(&line) {
                    Some(code) => format!("{code}\n"),
                    None => self.execute(command),
                },
            };
            let answered = handshake::reply(connection, &text).is_ok();
            if let (Ok(Command::Quit(timeout)), true) = (command, privileged) {
                connection.shutdown();
                self.quit(timeout);
            }
            if !answered {
                return;
            }
        }
    }

    fn injected(&self, line: &str) -> Option<i32> {
        let name = line.split_whitespace().next().unwrap_or_default();
        self.faults.injected(&format!("mps:command:{name}"))
    }

    /// Carries a command out: the text of the answer.
    fn execute(self: &Arc<Self>, command: &Command) -> String {
        match command {
            Command::GetServerList => lines(self.lock().servers.keys()),
            Command::GetServerStatus(pid) => {
                let state = self.lock();
                state.servers.get(pid).map_or_else(|| no_server(*pid), |s| format!("{}\n", s.status.word()))
            }
            Command::StartServer(uid) => self.start_server_for(*uid),
            Command::ShutdownServer { server, force } => self.shutdown_server(*server, *force),
            Command::GetClientList(pid) => self.lock().client_pids(*pid).map_or_else(|| no_server(*pid), lines),
            Command::GetDeviceClientList(only) => self.lock().device_clients(*only),
            Command::Ps(only) => self.lock().table(*only),
            Command::TerminateClient { server, client } => self.terminate_client(*server, *client),
            Command::GetDefaultThreads => percentage(&self.lock().defaults),
            Command::SetDefaultThreads(value) => {
                let mut state = self.lock();
                state.defaults.threads = *value;
                percentage(&state.defaults)
            }
            Command::GetThreads(pid) => {
                self.lock().servers.get(pid).map_or_else(|| no_server(*pid), |server| percentage(&server.settings))
            }
            Command::SetThreads(pid, value) => {
                self.set(*pid, |settings| settings.threads = *value).map_or_else(|| no_server(*pid), |s| percentage(&s))
            }
            Command::GetDefaultMemory(device) => memory(&self.lock().defaults, device),
            Command::SetDefaultMemory(device, value) => {
                self.lock().defaults.set_memory(device, value);
                String::new()
            }
            Command::GetMemory(pid, device) => {
                let state = self.lock();
                state.servers.get(pid).map_or_else(|| no_server(*pid), |server| memory(&server.settings, device))
            }
            Command::SetMemory(pid, device, value) => {
                let set = self.set(*pid, |settings| settings.set_memory(device, value));
                set.map_or_else(|| no_server(*pid), |_| String::new())
            }
            Command::GetDefaultPriority => format!("{}\n", self.lock().defaults.priority),
            Command::SetDefaultPriority(value) => {
                self.lock().defaults.priority = *value;
                String::new()
            }
            Command::Quit(_) => String::new(),
            Command::Help => HELP.to_owned(),
        }
    }

    /// Changes the limits of a server's next clients: the settings then.
    fn set(&self, pid: u32, change: impl FnOnce(&mut Settings)) -> Option<Settings> {
        let mut state = self.lock();
        let server = state.servers.get_mut(&pid)?;
        change(&mut server.settings);
        // For the server's log only: each client's limits travel with it.
        let _ = wire::try_send(&server.link, &ToServer::Settings(server.settings.clone()));
        Some(server.settings.clone())
    }

    fn start_server_for(self: &Arc<Self>, uid: u32) -> String {
        let mut state = self.lock();
        if let Some((pid, server)) = state.servers.iter().next() {
            return format!("Server {pid} of user {} already exists\n", server.uid);
        }
        let uid = if self.config.multi_user { 0 } else { uid };
        match self.start_server(&mut state, uid) {
            Ok(_) => String::new(),
            Err(error) => format!("Failed to start a server: {error}\n"),
        }
    }

    fn shutdown_server(&self, pid: u32, force: bool) -> String {
        let mut state = self.lock();
        if !state.servers.contains_key(&pid) {
            return no_server(pid);
        }
        if let Some(server) = state.servers.get_mut(&pid) {
            server.leaving = true;
        }
        while !force && state.servers.get(&pid).is_some_and(|server| !server.clients.is_empty()) {
            state = self.wait(state, WAITING);
        }
        self.end_server(&mut state, pid);
        while state.servers.contains_key(&pid) {
            state = self.wait(state, WAITING);
        }
        String::new()
    }

    /// Waits for the client however long it takes: one that is stopped does not answer before it runs again.
    fn terminate_client(&self, server: u32, client: u32) -> String {
        let mut state = self.lock();
        let request = state.next_number();
        let Some(link) = state.servers.get(&server).map(|server| Arc::clone(&server.link)) else {
            return no_server(server);
        };
        drop(state);
        if wire::send(&link, &ToServer::Terminate { request, pid: client }).is_err() {
            return no_server(server);
        }
        state = self.lock();
        loop {
            if let Some(result) = state.terminated.remove(&request) {
                return format!("{result}\n");
            }
            if !state.servers.contains_key(&server) {
                return no_server(server);
            }
            state = self.wait(state, WAITING);
        }
    }

    /// Ends the daemon: waits for the clients, no longer than `timeout`, then ends the servers. Does not return.
    fn quit(&self, timeout: Option<Duration>) {
        let directory = &self.config.pipe_directory;
        let mut state = self.lock();
        if std::mem::replace(&mut state.quitting, true) {
            return;
        }
        for name in ["control", "control_privileged"] {
            // Gone already is what is wanted.
            let _ = fs::remove_file(directory.join(name));
        }
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        while deadline.is_none_or(|deadline| Instant::now() < deadline)
            && state.servers.values().any(|server| !server.clients.is_empty())
        {
            state = self.wait(state, WAITING);
        }
        let pids: Vec<u32> = state.servers.keys().copied().collect();
        for pid in pids {
            self.end_server(&mut state, pid);
        }
        let deadline = Instant::now() + END;
        while !state.servers.is_empty() && Instant::now() < deadline {
            state = self.wait(state, WAITING);
        }
        // A server that hangs ends when it runs again and finds the daemon gone.
        for name in ["nvidia-cuda-mps-control.pid", "log"] {
            let _ = fs::remove_file(directory.join(name));
        }
        self.log("Exit");
        // What the server logged last may still be on its way.
        thread::sleep(Duration::from_millis(10));
        process::exit(0);
    }
}

fn lines<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let mut lines: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    lines.push(String::new());
    lines.join("\n")
}

fn percentage(settings: &Settings) -> String {
    format!("{:.1}\n", settings.threads)
}

/// The limit as it was set for that name; nothing where none was.
fn memory(settings: &Settings, device: &str) -> String {
    let limit = settings.memory.iter().find(|limit| limit.device == device);
    limit.map_or_else(String::new, |limit| format!("{}\n", limit.value))
}

fn no_server(pid: u32) -> String {
    format!("Server {pid} not found\n")
}
