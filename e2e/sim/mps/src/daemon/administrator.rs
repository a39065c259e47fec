//! Executes administrators' commands.
//!
//! A command about a server waits for the server's answer. Therefore, a server that waits for a
//! client also blocks the daemon.

use std::fs;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::Daemon;
use super::state::ServerRecord;
use crate::command::{COMMAND_HELP, Command};
use crate::handshake;
use crate::limits::ClientSettings;
use crate::seqpacket::Connection;
use crate::server::clients::CUDA_ERROR_INVALID_VALUE;
use crate::wire::{self, ServerStatus, ToServer};

/// Maximum time that the daemon waits for its servers to exit.
const SERVER_EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum interval between checks of the condition for which a command waits.
const CONDITION_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The lines of an answer, or of an error.
type Answer = Result<Vec<String>, Vec<String>>;

impl Daemon {
    /// Answers an administrator's commands until the administrator ends the session.
    pub(super) fn serve_administrator(self: &Arc<Self>, connection: &Connection, privileged: bool) {
        let mut quit = None;
        loop {
            let line = match handshake::next_command(connection) {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(_) => return,
            };
            self.log(&format!("Cmd:{line}"));
            if self.faults.apply_faults(&format!("mps:close:{}", command_name(&line))).is_some() {
                return;
            }
            let lines = match Command::parse(&line) {
                Err(mistake) => vec![mistake.to_string()],
                Ok(command) if command.is_privileged() && !privileged => vec![privilege_error(&line)],
                Ok(command) => {
                    let injected = self.faults.apply_faults(&format!("mps:command:{}", command_name(&line)));
                    if let (Command::Quit(timeout), None) = (&command, injected) {
                        quit = Some(*timeout);
                    }
                    injected.map_or_else(
                        || self.execute(&command).unwrap_or_else(|error| error),
                        |code| vec![code.to_string()],
                    )
                }
            };
            for line in lines {
                self.log(&line);
                if handshake::send_answer_line(connection, &line).is_err() {
                    return;
                }
            }
        }
        // Ignore errors, because the administrator may have closed the connection before the end of
        // the answer.
        let _ = connection.send(&handshake::END_OF_REPLIES);
        connection.shutdown();
        if let Some(timeout) = quit {
            self.quit_daemon(timeout);
        }
    }

    fn execute(self: &Arc<Self>, command: &Command) -> Answer {
        let one = |line: String| Ok(vec![line]);
        match command {
            Command::GetServerList => Ok(self.lock().servers.keys().map(u32::to_string).collect()),
            Command::GetServerStatus(pid) => {
                one(self.read_server_property(*pid, |server| server.status.word().to_owned())?)
            }
            Command::StartServer(uid) => self.start_server_for(*uid),
            Command::ShutdownServer { server, force } => self.shutdown_server(*server, *force),
            Command::GetClientList(pid) => {
                self.send_to_server(*pid, |request| ToServer::Ping { request })?;
                let pids = self.lock().client_pids(*pid).ok_or_else(|| no_server_error(*pid))?;
                Ok(pids.iter().map(u32::to_string).collect())
            }
            Command::GetDeviceClientList(only) => {
                self.wait_for_all_servers()?;
                Ok(self.lock().device_client_lines(*only))
            }
            Command::Ps(only) => {
                self.wait_for_all_servers()?;
                Ok(self.lock().ps_lines(*only))
            }
            Command::TerminateClient { server, client } => {
                let result = self.send_to_server(*server, |request| ToServer::Terminate { request, pid: *client })?;
                let mut lines = vec![result.to_string()];
                if result == CUDA_ERROR_INVALID_VALUE {
                    lines.insert(0, format!("Invalid process {client}!"));
                }
                Ok(lines)
            }
            Command::GetDefaultThreads => one(format_percentage(&self.lock().defaults)),
            Command::SetDefaultThreads(value) => {
                let defaults = &mut self.lock().defaults;
                defaults.threads = value.unwrap_or(defaults.threads);
                one(format_percentage(defaults))
            }
            Command::GetThreads(pid) => {
                one(self.read_server_property(*pid, |server| format_percentage(&server.settings))?)
            }
            Command::SetThreads(pid, value) => {
                let set = |settings: &mut ClientSettings| settings.threads = value.unwrap_or(settings.threads);
                one(self.set_limits(*pid, set, format_percentage)?)
            }
            Command::GetDefaultMemory(device) => {
                Ok(self.lock().defaults.format_memory_limit(device).into_iter().collect())
            }
            Command::SetDefaultMemory(device, value) => {
                self.lock().defaults.set_memory_limit(device, value);
                Ok(Vec::new())
            }
            Command::GetMemory(pid, device) => Ok(self
                .read_server_property(*pid, |server| server.settings.format_memory_limit(device))?
                .into_iter()
                .collect()),
            Command::SetMemory(pid, device, value) => {
                self.set_limits(*pid, |settings| settings.set_memory_limit(device, value), |_| ())?;
                Ok(Vec::new())
            }
            Command::GetDefaultPriority => one(self.lock().defaults.priority.to_string()),
            Command::SetDefaultPriority(value) => {
                self.lock().defaults.priority = *value;
                Ok(Vec::new())
            }
            Command::Quit(_) => Ok(Vec::new()),
            Command::Help => Ok(COMMAND_HELP.lines().map(str::to_owned).collect()),
        }
    }

    /// Waits until a server has answered, and then reads a property of the server.
    fn read_server_property<T>(&self, pid: u32, read: impl FnOnce(&ServerRecord) -> T) -> Result<T, Vec<String>> {
        self.send_to_server(pid, |request| ToServer::Ping { request })?;
        self.lock().servers.get(&pid).map(read).ok_or_else(|| no_server_error(pid))
    }

    /// Changes the settings for a server's next clients, and returns a value from the changed
    /// settings.
    fn set_limits<T>(
        &self,
        pid: u32,
        change: impl FnOnce(&mut ClientSettings),
        read: impl FnOnce(&ClientSettings) -> T,
    ) -> Result<T, Vec<String>> {
        self.send_to_server(pid, |request| ToServer::Ping { request })?;
        let mut state = self.lock();
        let server = state.servers.get_mut(&pid).ok_or_else(|| no_server_error(pid))?;
        change(&mut server.settings);
        // The server only logs these settings. The daemon sends each client's settings together
        // with the client.
        let _ = wire::try_send(&server.link, &ToServer::ClientSettings(server.settings.clone()));
        Ok(read(&server.settings))
    }

    /// Sends a request to a server and waits for the answer without a deadline.
    fn send_to_server(&self, pid: u32, question: impl FnOnce(u64) -> ToServer) -> Result<i32, Vec<String>> {
        let mut state = self.lock();
        let request = state.next_number();
        let server = state.servers.get(&pid).ok_or_else(|| no_server_error(pid))?;
        if server.status == ServerStatus::Initializing {
            return Ok(0);
        }
        let link = Arc::clone(&server.link);
        drop(state);
        wire::send(&link, &question(request)).map_err(|_| no_server_error(pid))?;
        state = self.lock();
        loop {
            if let Some(result) = state.answers.remove(&request) {
                return Ok(result);
            }
            if !state.servers.contains_key(&pid) {
                return Err(no_server_error(pid));
            }
            state = self.wait_for_change(state, CONDITION_CHECK_INTERVAL);
        }
    }

    /// Waits until every server has answered. Fails if no server exists.
    fn wait_for_all_servers(&self) -> Result<(), Vec<String>> {
        let pids: Vec<u32> = self.lock().servers.keys().copied().collect();
        if pids.is_empty() {
            return Err(vec!["Server not found".to_owned()]);
        }
        for pid in pids {
            self.send_to_server(pid, |request| ToServer::Ping { request })?;
        }
        Ok(())
    }

    fn start_server_for(self: &Arc<Self>, uid: u32) -> Answer {
        let mut state = self.lock();
        if let Some((pid, server)) = state.servers.iter().next() {
            return Err(vec![format!("Server {pid} of user {} already exists", server.uid)]);
        }
        let uid = if self.config.multi_user { 0 } else { uid };
        let started = self.start_server(&mut state, uid);
        started.map(|_| Vec::new()).map_err(|error| vec![format!("Failed to start a server: {error}")])
    }

    fn shutdown_server(&self, pid: u32, force: bool) -> Answer {
        let mut state = self.lock();
        state.servers.get_mut(&pid).ok_or_else(|| no_server_error(pid))?.exiting = true;
        while !force && state.servers.get(&pid).is_some_and(|server| !server.clients.is_empty()) {
            state = self.wait_for_change(state, CONDITION_CHECK_INTERVAL);
        }
        self.end_server(&mut state, pid);
        while state.servers.contains_key(&pid) {
            state = self.wait_for_change(state, CONDITION_CHECK_INTERVAL);
        }
        Ok(Vec::new())
    }

    /// Waits until no clients remain or until `timeout` has passed, stops the servers, and exits
    /// the process. This function does not return.
    fn quit_daemon(&self, timeout: Option<Duration>) {
        let directory = &self.config.pipe_directory;
        for name in ["control", "control_privileged"] {
            // Ignore errors, because the file may not exist.
            let _ = fs::remove_file(directory.join(name));
        }
        let mut state = self.lock();
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        while deadline.is_none_or(|deadline| Instant::now() < deadline)
            && state.servers.values().any(|server| !server.clients.is_empty())
        {
            state = self.wait_for_change(state, CONDITION_CHECK_INTERVAL);
        }
        let pids: Vec<u32> = state.servers.keys().copied().collect();
        for pid in pids {
            self.end_server(&mut state, pid);
        }
        let deadline = Instant::now() + SERVER_EXIT_TIMEOUT;
        while !state.servers.is_empty() && Instant::now() < deadline {
            state = self.wait_for_change(state, CONDITION_CHECK_INTERVAL);
        }
        // Do not wait longer: a server that hangs exits when it detects that the daemon has exited.
        for name in ["nvidia-cuda-mps-control.pid", "log"] {
            let _ = fs::remove_file(directory.join(name));
        }
        self.log("Exit");
        // Wait a moment, because the servers' last log lines may still be in the pipe.
        thread::sleep(Duration::from_millis(10));
        process::exit(0);
    }
}

/// Returns the command's name: the first word of a line.
fn command_name(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or_default()
}

fn privilege_error(line: &str) -> String {
    format!("Not enough privilege to execute {} command", command_name(line))
}

fn format_percentage(settings: &ClientSettings) -> String {
    format!("{:.1}", settings.threads)
}

fn no_server_error(pid: u32) -> Vec<String> {
    vec![format!("Server {pid} not found")]
}
