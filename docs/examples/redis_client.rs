// A request over Redis, by the standard library alone: rustc redis_client.rs && ./redis_client
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// Reads a reply into `found`; the strings of arrays are joined to one list.
fn reply(server: &mut BufReader<TcpStream>, found: &mut Vec<String>) {
    let mut line = String::new();
    server.read_line(&mut line).expect("the connection is lost");
    let size: i64 = line[1..].trim().parse().unwrap_or(-1);
    match &line[..1] {
        "-" => panic!("{line}"),
        "*" => (0..size).for_each(|_| reply(server, found)),
        "$" if size >= 0 => {
            let mut text = vec![0; size as usize + 2];
            server.read_exact(&mut text).expect("the connection is lost");
            text.truncate(size as usize);
            found.push(String::from_utf8(text).expect("no text"));
        }
        _ => {}
    }
}

fn command(server: &mut BufReader<TcpStream>, words: &[&str]) -> Vec<String> {
    let mut sent = format!("*{}\r\n", words.len());
    for word in words {
        sent += &format!("${}\r\n{}\r\n", word.len(), word);
    }
    server.get_mut().write_all(sent.as_bytes()).expect("the connection is lost");
    let mut found = Vec::new();
    reply(server, &mut found);
    found
}

fn main() {
    let url = std::env::var("REDIS_URL").expect("REDIS_URL: redis://:PASSWORD@HOST:PORT");
    let place = url.trim_start_matches("redis://").split('/').next().unwrap();
    let (user, address) = place.rsplit_once('@').unwrap_or(("", place));
    let mut server = BufReader::new(TcpStream::connect(address).expect("no server"));
    if let Some((_, password)) = user.split_once(':') {
        command(&mut server, &["AUTH", password]);
    }
    let request = r#"{"prompt": "98 + 25 =", "sampling": {"temperature": 0}, "stream": false}"#;
    let id = command(&mut server, &["XADD", "nano:requests", "*", "json", request]).remove(0);
    let out = format!("nano:out:{id}");
    loop {
        let read = ["XREAD", "COUNT", "1", "BLOCK", "5000", "STREAMS", &out, "0"];
        if let [_, _, _, completion] = &command(&mut server, &read)[..] {
            println!("{completion}"); // without a stream it is the only output
            return;
        }
    }
}
